{{/* list root component values: the pod of a router or a worker */}}
{{- define "headrace.podTemplate" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
metadata:
  annotations:
    checksum/settings: {{ include "headrace.settings" . | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "headrace.labels" (list $root $component) | nindent 4 }}
    # Ray's machines reach one another at all ports, as workers do.
    headrace/part: {{ eq $component "router" | ternary "router" "worker" }}
    {{- if ne $component "launcher" }}
    headrace/metrics: "true"
    {{- end }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "headrace.podSpec" . | nindent 2 }}
{{- end -}}

{{/* list root component values [template of its container] */}}
{{- define "headrace.podSpec" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
serviceAccountName: {{ include "headrace.serviceAccount" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "headrace.gracePeriod" . }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- if $values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ default 1 .maxSkew | int }}
    whenUnsatisfiable: {{ default "ScheduleAnyway" .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "headrace.selector" (list $root $component) | nindent 8 }}
  {{- end }}
{{- end }}
{{- with $values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - {{- include (gt (len .) 3 | ternary (last .) "headrace.container") . | nindent 4 }}
volumes:
  {{- include "headrace.volumes" . | nindent 2 }}
{{- end -}}

{{- define "headrace.container" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
{{- $isRouter := eq $component "router" -}}
name: {{ $isRouter | ternary "router" $values.role }}
image: {{ include "headrace.image" (list $root $values.image) }}
imagePullPolicy: {{ $values.image.pullPolicy }}
command: ["headrace"]
args:
  - {{ $isRouter | ternary "router" $values.role }}
  - --config=/etc/headrace/settings/headrace.yaml
  {{- if not $isRouter }}
  - --id=$(POD_NAME)
  {{- end }}
  {{- range $values.extraArgs }}
  - {{ . | quote }}
  {{- end }}
env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: HEADRACE_RPC__ADVERTISE_HOST
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: HOME
    value: /tmp
  - name: HF_HOME
    value: /var/cache/headrace/models/huggingface
  {{- $engine := default dict (include "headrace.settings" . | fromJson).engine }}
  {{- if not (or $isRouter $engine.num_threads (gt (int $engine.tensor_parallel_size) 1)) }}
  # What the pod may use, not what the machine has: threads without cores of their own wait for one another. Ranks share it.
  - name: HEADRACE_ENGINE__NUM_THREADS
    valueFrom: {resourceFieldRef: {resource: requests.cpu}}
  {{- end }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: grpc, containerPort: {{ $isRouter | ternary 8470 ($values.ports).grpc }}}
  {{- if $isRouter }}
  - {name: http, containerPort: 8000}
  {{- end }}
  - {name: metrics, containerPort: {{ $isRouter | ternary 9100 ($values.ports).metrics }}}
{{- with $values.probes }}
startupProbe:
  httpGet: {path: /health, port: metrics}
  {{- toYaml .startup | nindent 2 }}
livenessProbe:
  httpGet: {path: /health, port: metrics}
  {{- toYaml .liveness | nindent 2 }}
readinessProbe:
  httpGet: {path: /ready, port: metrics}
  {{- toYaml .readiness | nindent 2 }}
{{- end }}
{{- with $values.preStopSeconds }}
lifecycle:
  preStop:
    exec: {command: ["sleep", {{ . | quote }}]}
{{- end }}
resources:
  {{- include "headrace.resources" $values | nindent 2 }}
{{- with include "headrace.securityContext" $values | fromJson }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "headrace.mounts" . | nindent 2 }}
{{- end -}}

{{/* Devices are counted in limits; Kubernetes takes requests from there. */}}
{{- define "headrace.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- range $device := list .accelerator .rdma -}}
{{- if ($device).resource -}}
{{- $_ := set $resources "limits" (merge (dict $device.resource (int $device.count)) (default dict $resources.limits)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* RDMA registers memory: it has to be locked. As JSON. */}}
{{- define "headrace.securityContext" -}}
{{- $context := deepCopy .securityContext -}}
{{- if (.rdma).resource -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $_ := set $context "capabilities" (set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK" | uniq)) -}}
{{- end -}}
{{- toJson $context -}}
{{- end -}}

{{- define "headrace.mounts" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
{{- $v := $root.Values -}}
- {name: settings, mountPath: /etc/headrace/settings, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: model-cache, mountPath: /var/cache/headrace/models}
{{- range $name := include "headrace.secretVolumes" . | fromJson | keys | sortAlpha }}
- {name: {{ $name }}, mountPath: /etc/headrace/{{ $name }}, readOnly: true}
{{- end }}
{{- if or (include "headrace.isWorker" (index . 1)) (eq (index . 1) "ray-head") }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- if include "headrace.isWorker" (index . 1) }}
{{- if $values.diskCache.enabled }}
- {name: disk-cache, mountPath: /var/cache/headrace/blocks}
{{- end }}
{{- end }}
{{- with $values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headrace.volumes" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
{{- $cache := $root.Values.modelCache -}}
- name: settings
  configMap: {name: {{ include "headrace.name" (list $root (eq $component "ray-head" | ternary "launcher" $component)) }}}
- name: tmp
  emptyDir: {}
{{- if eq $cache.type "emptyDir" }}
- name: model-cache
  emptyDir: {sizeLimit: {{ $cache.size }}}
{{- else if eq $cache.type "shared" }}
- name: model-cache
  persistentVolumeClaim: {claimName: {{ default (include "headrace.name" (list $root "models")) $cache.existingClaim }}}
{{- else if or (ne (include "headrace.isWorker" $component) "true") $root.Values.rayCluster.enabled }}
- name: model-cache
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "headrace.claimSpec" (dict "accessMode" "ReadWriteOnce" "size" $cache.size "storageClass" $cache.storageClass) | nindent 8 }}
{{- end }}
{{- range $name, $secret := include "headrace.secretVolumes" . | fromJson }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret.name }}
    defaultMode: 0440
    items:
      {{- range $key, $path := $secret.items }}
      - {key: {{ $key | quote }}, path: {{ $path }}}
      {{- end }}
{{- end }}
{{- if or (include "headrace.isWorker" $component) (eq $component "ray-head") }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ default $root.Values.poolDefaults.sharedMemory $values.sharedMemory }}}
{{- end }}
{{- with $values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* list root component …: by the name of the volume, which is its folder under /etc/headrace. As JSON. */}}
{{- define "headrace.secretVolumes" -}}
{{- $root := index . 0 -}}
{{- $isRouter := not (include "headrace.isWorker" (index . 1)) -}}
{{- $v := $root.Values -}}
{{- $volumes := dict -}}
{{- with include "headrace.redisSecret" $root | fromJson -}}
{{- if .name }}{{ $_ := set $volumes "redis" (dict "name" .name "items" (dict .key "password")) }}{{ end -}}
{{- end -}}
{{- if and $v.redis.external.url $v.redis.external.ca.name -}}
{{- $_ := set $volumes "redis-ca" (dict "name" $v.redis.external.ca.name "items" (dict $v.redis.external.ca.key "ca.crt")) -}}
{{- end -}}
{{- if ne $v.tls.mode "none" -}}
{{- $secret := include "headrace.tlsSecret" (list $root (include "headrace.part" (index . 1))) -}}
{{- $_ := set $volumes "tls" (dict "name" $secret "items" (dict "tls.crt" "tls.crt" "tls.key" "tls.key" "ca.crt" "ca.crt")) -}}
{{- end -}}
{{- if $isRouter -}}
{{- if $v.tls.frontSecret -}}
{{- $_ := set $volumes "front-tls" (dict "name" $v.tls.frontSecret "items" (dict "tls.crt" "tls.crt" "tls.key" "tls.key")) -}}
{{- end -}}
{{- range $volume, $field := dict "api-keys" (list "apiKeys" "keys.yaml") "cache-secret" (list "cacheSecret" "cache.secret") "client-ca" (list "clientCa" "ca.crt") -}}
{{- $secret := get $v.auth (index $field 0) -}}
{{- if $secret.name }}{{ $_ := set $volumes $volume (dict "name" $secret.name "items" (dict $secret.key (index $field 1))) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toJson $volumes -}}
{{- end -}}

{{- define "headrace.claimSpec" -}}
accessModes: [{{ .accessMode }}]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end -}}
