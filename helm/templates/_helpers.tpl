{{/* Names. 30 characters, since those of pods and the labels made of them get longer. */}}
{{- define "kvasir.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvasir.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "kvasir.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels: dict "root" $ "component" "router". Those that select never change. */}}
{{- define "kvasir.selector" -}}
app.kubernetes.io/name: {{ include "kvasir.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvasir.labels" -}}
{{ include "kvasir.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: kvasir
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without versions, so that only what concerns a pod restarts it. */}}
{{- define "kvasir.podLabels" -}}
{{ include "kvasir.selector" . }}
app.kubernetes.io/part-of: kvasir
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvasir.image" -}}
{{- $digest := ternary "" (printf "@%s" .image.digest) (empty .image.digest) -}}
{{- printf "%s:%s%s" .image.repository (default .root.Chart.AppVersion .image.tag) $digest | quote -}}
{{- end -}}

{{/* Where replicas run, and why there, as YAML. What runs already stays: KubeRay that comes later replaces no fleet,
and where the chart cannot look at the cluster it takes StatefulSets each time. */}}
{{- define "kvasir.fleetChoice" -}}
{{- $sets := dict -}}
{{- if and (eq .Values.fleet.mode "auto") (.Capabilities.APIVersions.Has "ray.io/v1/RayCluster") -}}
{{- $sets = lookup "apps/v1" "StatefulSet" .Release.Namespace "" -}}
{{- end -}}
{{- if eq (include "kvasir.pools" .) "{}" -}}
{mode: statefulset, why: no pool has replicas of its own}
{{- else if ne .Values.fleet.mode "auto" -}}
{mode: {{ .Values.fleet.mode }}, why: fleet.mode says so}
{{- else if not (.Capabilities.APIVersions.Has "ray.io/v1/RayCluster") -}}
{mode: statefulset, why: KubeRay's API is not there}
{{- else if include "kvasir.scaledSets" . -}}
{mode: statefulset, why: a pool scales by hpa or keda}
{{- else if not $sets -}}
{mode: statefulset, why: the chart was rendered without a look at the cluster}
{{- else if include "kvasir.poolSets" (dict "root" . "sets" $sets.items) -}}
{mode: statefulset, why: they run already; an upgrade does not replace them}
{{- else -}}
{mode: kuberay, why: KubeRay's API is there}
{{- end -}}
{{- end -}}

{{/* Whether any of these StatefulSets has replicas of this release: dict "root" $ "sets" …. */}}
{{- define "kvasir.poolSets" -}}
{{- $wanted := include "kvasir.selector" (dict "root" .root "component" "replica") | fromYaml -}}
{{- range $set := .sets -}}
{{- $labels := default dict $set.metadata.labels -}}
{{- if eq (toJson (merge (deepCopy $wanted) $labels)) (toJson $labels) -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvasir.inRay" -}}
{{- if eq (include "kvasir.fleetChoice" . | fromYaml).mode "kuberay" -}}yes{{- end -}}
{{- end -}}

{{/* All pools with replicas of their own, with poolDefaults filled in and with what follows from the rest, as YAML:
name → pool. */}}
{{- define "kvasir.pools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := default (dict "main" dict) .Values.pools -}}
{{- $whole := mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy (default dict $pool)) -}}
{{- if not (include "kvasir.engines" $whole) -}}
{{- /* The model that ships needs no GPU, and little of the rest. */ -}}
{{- $is_small := and (eq $whole.model.source "toy") (not $whole.gpu.count) (ne $whole.engine "vllm") -}}
{{- $_ := set $whole "engine" (default (ternary "torch" "vllm" $is_small) $whole.engine) -}}
{{- if kindIs "invalid" $whole.gpu.count -}}
{{- $_ := set $whole.gpu "count" (include "kvasir.gpus" $whole | int) -}}
{{- end -}}
{{- $kind := ternary "cpu" "cuda" $is_small -}}
{{- $_ := set $whole.image "repository" (default (printf "ghcr.io/kvasir/replica-%s" $kind) $whole.image.repository) -}}
{{- $requests := ternary (dict "cpu" "250m" "memory" "512Mi") (dict "cpu" "2" "memory" "8Gi") $is_small -}}
{{- $limits := dict "memory" (ternary "2Gi" "16Gi" $is_small) -}}
{{- $_ := set $whole "resources" (merge (default dict $whole.resources) (dict "requests" $requests "limits" $limits)) -}}
{{- $_ := set $whole "autoscaling" (include "kvasir.roleTargets" $whole | fromYaml) -}}
{{- $_ := set $pools $name $whole -}}
{{- end -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* GPUs of a replica that does not say how many: those over which vLLM divides the model. */}}
{{- define "kvasir.gpus" -}}
{{- $arguments := default dict .settings.engine_args -}}
{{- if eq .engine "vllm" -}}
{{- mul (dig "tensor_parallel_size" 1 $arguments) (dig "pipeline_parallel_size" 1 $arguments) -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{/*
Megabytes of data in Redis: the streams of index changes, one for each pool's model, what the replicas' caches
are indexed with while they are written anew, the answers' tokens that routers tell each other, and leases, clients
and the reserve that leases are kept apart by.
*/}}
{{- define "kvasir.redisMegabytes" -}}
{{- $redis := .Values.redis.builtin -}}
{{- if $redis.maxMemory -}}
{{- $number := regexFind "^[0-9]+" $redis.maxMemory | int64 -}}
{{- $unit := regexFind "[kmg]" $redis.maxMemory -}}
{{- if eq $unit "g" -}}{{- mul $number 1024 -}}
{{- else if eq $unit "m" -}}{{- $number -}}
{{- else if eq $unit "k" -}}{{- max 1 (div $number 1024) -}}
{{- else -}}{{- max 1 (div $number 1048576) -}}
{{- end -}}
{{- else -}}
{{- $settings := .Values.router.settings -}}
{{- $isShared := not (regexMatch "(^|,) *(shared_)?history *(,|$)" (join "," (dig "off" "" $settings))) -}}
{{- $share := ternary (div (dig "redis_bytes" 201326592 $settings | int64) 3) 0 $isShared -}}
{{- $total := add 256 (div (dig "all_history_bytes" $share $settings | int64) 1048576) -}}
{{- range $pool := include "kvasir.pools" . | fromYaml -}}
{{- $replicas := ternary $pool.autoscaling.maxReplicas $pool.replicas $pool.autoscaling.enabled | int64 -}}
{{- $stream := div (default 67108864 $pool.settings.events_stream_bytes | int64) 1048576 -}}
{{- $total = add $total (mul 2 $stream) (mul 16 $replicas) -}}
{{- end -}}
{{- range $pool := include "kvasir.findingPools" . | fromYaml -}}
{{- $stream := div (default 67108864 $pool.settings.events_stream_bytes | int64) 1048576 -}}
{{- $total = add $total (mul 2 $stream) (mul 16 (int64 $pool.engines.atMost)) -}}
{{- end -}}
{{- $total -}}
{{- end -}}
{{- end -}}

{{/* Redis' resources: memory follows from its data unless it is set; twice as much, for pages that are copied. */}}
{{- define "kvasir.redisResources" -}}
{{- $megabytes := include "kvasir.redisMegabytes" . | int64 -}}
{{- $resources := deepCopy .Values.redis.builtin.resources -}}
{{- $requests := merge (default dict $resources.requests) (dict "memory" (printf "%dMi" (add 64 $megabytes))) -}}
{{- $limits := merge (default dict $resources.limits) (dict "memory" (printf "%dMi" (add 64 (mul 2 $megabytes)))) -}}
{{- toYaml (dict "requests" $requests "limits" $limits) -}}
{{- end -}}

{{/* A value as the text of an environment variable. Whole numbers come as floats: 1.34217728e+08. */}}
{{- define "kvasir.text" -}}
{{- if or (kindIs "map" .) (kindIs "slice" .) -}}
{{- toJson . | quote -}}
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{- int64 . | toString | quote -}}{{- else -}}{{- toString . | quote -}}{{- end -}}
{{- else -}}
{{- toString . | quote -}}
{{- end -}}
{{- end -}}

{{/* Settings as environment variables: dict "prefix" "KVASIR_ROUTER_" "settings" (dict …). */}}
{{- define "kvasir.settings" -}}
{{- range $name, $value := .settings }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ $.prefix }}{{ upper $name }}
  value: {{ include "kvasir.text" $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings that routers and replicas share: dict "root" $ "prefix" "KVASIR_ROUTER_". */}}
{{- define "kvasir.sharedSettings" -}}
{{- $values := .root.Values -}}
{{- $shared := dict "index_stride" $values.indexStride "log_format" $values.logFormat "log_level" $values.logLevel -}}
{{- if $values.traces.endpoint -}}
{{- $_ := set $shared "otlp_endpoint" $values.traces.endpoint -}}
{{- $_ := set $shared "trace_sample_ratio" $values.traces.sampleRatio -}}
{{- end -}}
{{- include "kvasir.settings" (dict "prefix" .prefix "settings" $shared) -}}
{{- end -}}

{{/* What processes expect of a home on a read-only file system. */}}
{{- define "kvasir.home" -}}
- name: HOME
  value: /tmp
- name: USER
  value: kvasir
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
{{- end -}}

{{/* Security contexts: of pods, with the same dict as podBasics, and of containers. Those of pools may say otherwise. */}}
{{- define "kvasir.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvasir.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvasir.poolContainerSecurity" -}}
{{- mergeOverwrite (include "kvasir.containerSecurity" . | fromYaml) (default dict .securityContext) | toYaml -}}
{{- end -}}

{{/* What every pod has: dict "root" $ "component" "router" "user" 10001, and of a pool its "security".
Service links would be variables such as KVASIR_ROUTER_PORT=tcp://…, which Kvasir would take for its settings. */}}
{{- define "kvasir.podBasics" -}}
serviceAccountName: {{ include "kvasir.fullname" .root }}-{{ .component }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- mergeOverwrite (include "kvasir.podSecurity" . | fromYaml) (default dict .security) | toYaml | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of every budget: a pod that is not healthy anyway never keeps a node from being drained. */}}
{{- define "kvasir.budget" -}}
unhealthyPodEvictionPolicy: AlwaysAllow
{{- end -}}

{{/* Where pods may run: values with nodeSelector, tolerations, affinity, priorityClassName. */}}
{{- define "kvasir.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The cluster secret as a file: what a container mounts, and the volume. */}}
{{- define "kvasir.clusterSecretMount" -}}
- name: secret
  mountPath: /etc/kvasir/secret
  readOnly: true
{{- end -}}

{{- define "kvasir.clusterSecretVolume" -}}
- name: secret
  secret:
    secretName: {{ include "kvasir.clusterSecretName" . }}
    defaultMode: 0440
    items:
      - key: {{ .Values.clusterSecret.key }}
        path: secret
{{- end -}}

{{- define "kvasir.clusterSecretName" -}}
{{- default (printf "%s-secret" (include "kvasir.fullname" .)) .Values.clusterSecret.existingSecret -}}
{{- end -}}
