{{/* What goes into a process's file of settings. Passwords and keys are files of their own, named here. */}}

{{/* list root component values: settings of its process. As JSON. `component` is router, ray-head, launcher or a pool. */}}
{{- define "headrace.settings" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
{{- $isRouter := not (include "headrace.isWorker" $component) -}}
{{- $v := $root.Values -}}
{{- $directory := dict "url" (include "headrace.redisUrl" $root) -}}
{{- if (include "headrace.redisSecret" $root | fromJson).name -}}
{{- $_ := set $directory "password_file" "/etc/headrace/redis/password" -}}
{{- end -}}
{{- with $v.redis.external -}}
{{- if .url -}}
{{- if .username }}{{ $_ := set $directory "username" .username }}{{ end -}}
{{- if .ca.name }}{{ $_ := set $directory "ca_file" "/etc/headrace/redis-ca/ca.crt" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $rpc := dict "host" "0.0.0.0" "port" ($isRouter | ternary 8470 ($values.ports).grpc) -}}
{{- if ne $v.tls.mode "none" -}}
{{- $folder := "/etc/headrace/tls" -}}
{{- $_ := set $rpc "tls" (dict "ca_file" (printf "%s/ca.crt" $folder) "cert_file" (printf "%s/tls.crt" $folder) "key_file" (printf "%s/tls.key" $folder)) -}}
{{- end -}}
{{- $derived := dict "directory" $directory "rpc" $rpc "model" (dict "cache_dir" "/var/cache/headrace/models") -}}
{{- $_ := set $derived "telemetry" (dict "metrics_port" ($isRouter | ternary 9100 ($values.ports).metrics)) -}}
{{- if $isRouter -}}
{{- $security := dict -}}
{{- if $v.auth.apiKeys.name }}{{ $_ := set $security "api_keys_file" "/etc/headrace/api-keys/keys.yaml" }}{{ end -}}
{{- if $v.auth.cacheSecret.name }}{{ $_ := set $security "cache_secret_file" "/etc/headrace/cache-secret/cache.secret" }}{{ end -}}
{{- if $v.auth.clientCa.name }}{{ $_ := set $security "client_ca_file" "/etc/headrace/client-ca/ca.crt" }}{{ end -}}
{{- if $v.tls.frontSecret -}}
{{- $_ := set $security "front_cert_file" "/etc/headrace/front-tls/tls.crt" -}}
{{- $_ := set $security "front_key_file" "/etc/headrace/front-tls/tls.key" -}}
{{- end -}}
{{- $_ := set $derived "security" $security -}}
{{- $_ := set $derived "http" (dict "port" 8000) -}}
{{- else -}}
{{- if $values.diskCache.enabled }}{{ $_ := set $derived "engine" (dict "disk_cache_dir" "/var/cache/headrace/blocks") }}{{ end -}}
{{- if and $values.rdma.resource $values.rdma.require }}{{ $_ := set $derived "kv" (dict "require_rdma" true) }}{{ end -}}
{{- end -}}
{{- if eq $component "launcher" -}}
{{- $_ := set $rpc "port" 8471 -}}
{{- $_ := set $derived "ray" (dict "router" (dict "headrace_router" 1) "prefill" (dict "headrace_prefill" 1) "decode" (dict "headrace_decode" 1)) -}}
{{- end -}}
{{- $own := include "headrace.merged" (list $v.settings $values.settings) | fromJson -}}
{{- include "headrace.merged" (list $own $derived) -}}
{{- end -}}

{{/* list root component values: seconds from the request to stop a pod to SIGKILL */}}
{{- define "headrace.gracePeriod" -}}
{{- $values := index . 2 -}}
{{- $drain := dig "rpc" "drain_timeout_s" 30 (include "headrace.settings" . | fromJson) -}}
{{- default (add (ceil $drain) $values.preStopSeconds 30) $values.terminationGracePeriodSeconds | int -}}
{{- end -}}
