{{/* Names and labels. Release names can have 53 characters, and a StatefulSet's name must leave room for what Kubernetes adds. */}}

{{- define "headrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- end -}}
{{- end -}}

{{/* list root suffix [room]: at most 50 characters, less `room`; what had to be cut keeps a hash, so that two long names
stay two. */}}
{{- define "headrace.name" -}}
{{- $root := index . 0 -}}
{{- $suffix := index . 1 -}}
{{- $whole := include "headrace.fullname" $root -}}
{{- $room := int (sub (sub 49 (len $suffix)) (gt (len .) 2 | ternary (last .) 0)) -}}
{{- if gt (len $whole) $room -}}
{{- $whole = printf "%s-%s" ($whole | trunc (int (sub $room 7)) | trimSuffix "-") ($whole | sha256sum | trunc 6) -}}
{{- end -}}
{{- printf "%s-%s" $whole $suffix -}}
{{- end -}}

{{- define "headrace.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "headrace.labels" -}}
{{- $root := index . 0 -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headrace.serviceAccount" -}}
{{- default (.Values.serviceAccount.create | ternary (include "headrace.name" (list . "pods")) "default") .Values.serviceAccount.name -}}
{{- end -}}

{{/* The operator appends -head-svc for a service, and cuts what is then longer than 50. */}}
{{- define "headrace.rayName" -}}
{{- include "headrace.name" (list . "ray" 9) -}}
{{- end -}}

{{/* list root image */}}
{{- define "headrace.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default (index . 0).Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* list base over: `over` wins, 0, false and "" included (Sprig's mergeOverwrite passes those over). As JSON. */}}
{{- define "headrace.merged" -}}
{{- $merged := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- $old := get $merged $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $old) -}}
{{- $_ := set $merged $key (include "headrace.merged" (list $old $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* list root name: a pool's values, over poolDefaults. As JSON. */}}
{{- define "headrace.pool" -}}
{{- $root := index . 0 -}}
{{- $own := get $root.Values.pools (index . 1) -}}
{{- $ray := $root.Values.rayCluster -}}
{{- $pool := include "headrace.merged" (list $root.Values.poolDefaults $own) | fromJson -}}
{{- toJson ($ray.enabled | ternary (set $pool "image" $ray.image) $pool) -}}
{{- end -}}

{{/* component: "true" for a pool */}}
{{- define "headrace.isWorker" -}}
{{- if not (has . (list "router" "ray-head" "launcher")) }}true{{ end -}}
{{- end -}}

{{/* component: whose certificate its processes show */}}
{{- define "headrace.part" -}}
{{- if eq . "launcher" }}launcher{{ else if include "headrace.isWorker" . }}worker{{ else }}router{{ end -}}
{{- end -}}

{{- define "headrace.redisSecret" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.external.url -}}
{{- toJson $redis.external.password -}}
{{- else -}}
{{- $own := dict "name" (include "headrace.name" (list . "redis")) "key" "password" -}}
{{- toJson (ternary $own $redis.password (empty $redis.password.name)) -}}
{{- end -}}
{{- end -}}

{{- define "headrace.redisUrl" -}}
{{- default (printf "redis://%s:6379/0" (include "headrace.name" (list . "redis"))) .Values.redis.external.url -}}
{{- end -}}

{{/* list root part: name of the Secret with its certificate; part is router, worker or launcher */}}
{{- define "headrace.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- $tls := $root.Values.tls -}}
{{- if eq $tls.mode "secrets" -}}
{{- get $tls.secrets (index . 1) -}}
{{- else -}}
{{- include "headrace.name" (list $root (printf "%s-tls" (index . 1))) -}}
{{- end -}}
{{- end -}}

{{/* list root component: the values of the router or of a pool. As JSON. */}}
{{- define "headrace.component" -}}
{{- $v := (index . 0).Values -}}
{{- if eq (index . 1) "router" -}}
{{- toJson $v.router -}}
{{- else if eq (index . 1) "ray-head" "launcher" -}}
{{- $of := get $v.rayCluster (eq (index . 1) "launcher" | ternary "launcher" "head") -}}
{{- include "headrace.merged" (list $v.router (merge (dict "image" $v.rayCluster.image "preStopSeconds" 0) $of)) -}}
{{- else -}}
{{- include "headrace.pool" . -}}
{{- end -}}
{{- end -}}
