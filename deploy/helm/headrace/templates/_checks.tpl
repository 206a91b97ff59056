{{/* What the schema can not say. A message names the keys. */}}

{{- define "headrace.checks" -}}
{{- $v := .Values -}}
{{- include "headrace.checkProtection" . -}}
{{- include "headrace.checkModelCache" . -}}
{{- include "headrace.checkComponent" (list . "router" "router" $v.router) -}}
{{- $decodes := false -}}
{{- range $name, $_ := $v.pools -}}
{{- $pool := include "headrace.pool" (list $ $name) | fromJson -}}
{{- $decodes = or $decodes (eq $pool.role "decode") -}}
{{- if eq $name "router" "redis" "metrics" "pods" "launcher" "ray-head" -}}
{{- fail (printf "pools.%s: this name is taken; choose another" $name) -}}
{{- end -}}
{{- include "headrace.checkComponent" (list $ $name (printf "pools.%s" $name) $pool) -}}
{{- if $v.rayCluster.enabled -}}
{{- include "headrace.checkRayPool" (list $ $name $pool) -}}
{{- end -}}
{{- end -}}
{{- if not $decodes -}}
{{- fail "pools: at least one pool needs role decode; workers that prefill do not answer by themselves" -}}
{{- end -}}
{{- end -}}

{{/* The processes would refuse to start; better told here. */}}
{{- define "headrace.checkProtection" -}}
{{- $v := .Values -}}
{{- $security := default dict $v.settings.security -}}
{{- if not $security.allow_insecure -}}
{{- if eq $v.tls.mode "none" -}}
{{- fail "tls.mode is none: set it to secrets or certManager; or, in a network that nobody else can reach, set settings.security.allow_insecure to true" -}}
{{- end -}}
{{- if not (or $v.auth.apiKeys.name (dig "jwt" "jwks" "" $security)) -}}
{{- fail "auth.apiKeys.name is empty: routers need credentials. Set it, or settings.security.jwt, or settings.security.allow_insecure to true" -}}
{{- end -}}
{{- end -}}
{{- if eq $v.tls.mode "secrets" -}}
{{- range $part := concat (list "router" "worker") ($v.rayCluster.enabled | ternary (list "launcher") list) -}}
{{- if not (get $v.tls.secrets $part) -}}
{{- fail (printf "tls.secrets.%s is empty: with tls.mode secrets it names the Secret with tls.crt, tls.key and ca.crt" $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.tls.mode "certManager") (not $v.tls.certManager.issuerName) -}}
{{- fail "tls.certManager.issuerName is empty: with tls.mode certManager it names an issuer of a private authority" -}}
{{- end -}}
{{- end -}}

{{- define "headrace.checkModelCache" -}}
{{- $cache := .Values.modelCache -}}
{{- $pods := ternary .Values.router.autoscaling.maxReplicas .Values.router.replicas .Values.router.autoscaling.enabled | int -}}
{{- range $name, $_ := .Values.pools -}}
{{- $pods = add $pods (include "headrace.pool" (list $ $name) | fromJson).replicas | int -}}
{{- end -}}
{{- if and (eq $cache.type "shared") (ne $cache.accessMode "ReadWriteMany") (gt $pods 1) -}}
{{- fail (printf "modelCache.accessMode %s lets one machine or pod write, and %d pods would share the claim (router.replicas and those of pools): take ReadWriteMany, or modelCache.type perPod" $cache.accessMode $pods) -}}
{{- end -}}
{{- end -}}

{{/* list root component key values */}}
{{- define "headrace.checkComponent" -}}
{{- $root := index . 0 -}}
{{- $key := index . 2 -}}
{{- $values := index . 3 -}}
{{- $of := list $root (index . 1) $values -}}
{{- $settings := include "headrace.settings" $of | fromJson -}}
{{- $drain := dig "rpc" "drain_timeout_s" 30 $settings -}}
{{- $lease := dig "kv" "lease_ttl_s" 10 $settings -}}
{{- $grace := include "headrace.gracePeriod" $of | int -}}
{{- if le (float64 $grace) (addf $drain $values.preStopSeconds) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds (%d) must be greater than rpc.drain_timeout_s (%v) and %s.preStopSeconds (%v) together, or pods are killed while they drain" $key $grace $drain $key $values.preStopSeconds) -}}
{{- end -}}
{{- if le (float64 $drain) (float64 $lease) -}}
{{- fail (printf "%s: settings.rpc.drain_timeout_s (%v) must be greater than settings.kv.lease_ttl_s (%v), or a worker ends while others read its blocks" $key $drain $lease) -}}
{{- end -}}
{{- range $values.extraArgs -}}
{{- if regexMatch "^(--set=)?(model\\.|directory\\.|engine\\.(block_size_tokens|kv_quantization)=|kv\\.(transport|lease_ttl_s)=|rpc\\.(host|port|tls|advertise_host)|http\\.(host|port|enabled)|telemetry\\.metrics_port|security\\.)" . -}}
{{- fail (printf "%s.extraArgs: %q is for all processes alike: set it under settings, or by the value that the chart has for it" $key .) -}}
{{- end -}}
{{- if regexMatch "^--(model|id|config)(=|$)" . -}}
{{- fail (printf "%s.extraArgs: %q is set by the chart; the model by settings.model.ref" $key .) -}}
{{- end -}}
{{- end -}}
{{- range $values.env -}}
{{- if regexMatch "^HEADRACE_(MODEL__|DIRECTORY__|ENGINE__(BLOCK_SIZE_TOKENS|KV_QUANTIZATION)$|KV__(TRANSPORT|LEASE_TTL_S)$|RPC__(HOST|PORT|TLS|ADVERTISE_HOST)|HTTP__(HOST|PORT|ENABLED)$|TELEMETRY__METRICS_PORT$|SECURITY__)" .name -}}
{{- fail (printf "%s.env: %s is for all processes alike: set it under settings, or by the value that the chart has for it" $key .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* list root name pool: Ray's workers get one set of settings, from the launcher. */}}
{{- define "headrace.checkRayPool" -}}
{{- $key := printf "pools.%s (or poolDefaults)" (index . 1) -}}
{{- $pool := index . 2 -}}
{{- range $field := list "settings" "extraArgs" -}}
{{- if get $pool $field -}}
{{- fail (printf "%s.%s is not empty: with rayCluster.enabled all workers have the same settings; use settings" $key $field) -}}
{{- end -}}
{{- end -}}
{{- if $pool.diskCache.enabled -}}
{{- fail (printf "%s.diskCache.enabled: Ray's pods have no volume of their own that outlives them" $key) -}}
{{- end -}}
{{- if $pool.hostNetwork -}}
{{- fail (printf "%s.hostNetwork: KubeRay's pods use Ray's ports, which would be the machine's" $key) -}}
{{- end -}}
{{- end -}}
