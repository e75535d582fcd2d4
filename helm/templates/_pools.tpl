{{/* Where a pool's model lies in its pods; empty for the one that ships. */}}
{{- define "kvasir.modelPath" -}}
{{- $model := .model -}}
{{- if eq $model.source "hub" -}}
/models/{{ base $model.repository }}
{{- else if eq $model.source "claim" -}}
/models/{{ trimAll "/" $model.path }}
{{- else if eq $model.source "image" -}}
{{- $model.path -}}
{{- end -}}
{{- end -}}

{{/* Where a pool's pods may run: what it says, and nodes that have its kind of GPU. */}}
{{- define "kvasir.poolPlacement" -}}
{{- $placed := deepCopy . -}}
{{- if and .gpu.count .gpu.product -}}
{{- $_ := set $placed "nodeSelector" (merge (dict .gpu.productLabel .gpu.product) .nodeSelector) -}}
{{- end -}}
{{- include "kvasir.placement" $placed -}}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* A pool's resources, GPUs included. */}}
{{- define "kvasir.poolResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .kv.memory -}}
{{- range $kind := list "requests" "limits" -}}
{{- $amounts := default dict (get $resources $kind) -}}
{{- if $amounts.memory -}}
{{- $sum := add (include "kvasir.mebibytes" $amounts.memory | int64) (include "kvasir.mebibytes" $.kv.memory | int64) -}}
{{- $_ := set $resources $kind (merge (dict "memory" (printf "%dMi" $sum)) $amounts) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .kv.disk (eq .kv.volume "emptyDir") -}}
{{- $_ := set $resources "requests" (merge (dict "ephemeral-storage" (include "kvasir.kvVolumeSize" .)) (default dict $resources.requests)) -}}
{{- end -}}
{{- if .gpu.count -}}
{{- $limits := merge (dict .gpu.resource .gpu.count) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* A quantity of memory, such as 64Gi, in MiB. */}}
{{- define "kvasir.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexFind "[KMGT]i$" . -}}
{{- if eq $unit "Ti" -}}{{- mul $number 1048576 -}}
{{- else if eq $unit "Gi" -}}{{- mul $number 1024 -}}
{{- else if eq $unit "Mi" -}}{{- $number -}}
{{- else -}}{{- div $number 1024 -}}
{{- end -}}
{{- end -}}

{{/* Whether replicas of any pool pull KV from each other. */}}
{{- define "kvasir.pulls" -}}
{{- range $pool := include "kvasir.pools" . | fromYaml -}}
{{- if $pool.settings.pull_bytes_per_second -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* A sentence for each pool whose role can do nothing, and each model that lacks one half: no prompt is split there. */}}
{{- define "kvasir.roleNotes" -}}
{{- $roles := dict -}}
{{- $finds := include "kvasir.findingPools" . | fromYaml -}}
{{- range $name, $pool := merge (include "kvasir.pools" . | fromYaml) $finds -}}
{{- $model := include "kvasir.modelName" $pool -}}
{{- $why := "" -}}
{{- if hasKey $finds $name -}}
{{- else if not $pool.kv.memory -}}{{- $why = "kv.memory is not set" -}}
{{- else if not $pool.settings.pull_bytes_per_second -}}{{- $why = "settings.pull_bytes_per_second is not set" -}}
{{- end -}}
{{- if not $why -}}{{- $_ := set $roles $model (append (default list (index $roles $model)) $pool.role) -}}{{- end -}}
{{- if and $why (ne $pool.role "both") }}
Pool {{ $name }} has the role {{ $pool.role }}, but no prompt will be split there, because {{ $why }}.
{{- end -}}
{{- end -}}
{{- range $model, $found := $roles -}}
{{- $found = uniq $found -}}
{{- if and (eq (len $found) 1) (ne (first $found) "both") }}
No prompt of {{ $model }} will be split, because its pools all have the role {{ first $found }}: each replica does all.
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Size of a volume for KV: the KV, a twentieth for the file system, what KV leaves free, and a gibibyte. */}}
{{- define "kvasir.kvVolumeSize" -}}
{{- $disk := include "kvasir.mebibytes" .kv.disk | int64 -}}
{{- $reserve := div (default 1073741824 .settings.disk_reserve_bytes | int64) 1048576 -}}
{{- printf "%dMi" (add $disk (div $disk 20) $reserve 1024) -}}
{{- end -}}

{{/* Settings for KV below the device, as YAML: dict "pool" $pool "folder" …. */}}
{{- define "kvasir.kvSettings" -}}
{{- with .pool.kv.memory }}
host_kv_bytes: {{ mul (include "kvasir.mebibytes" . | int64) 1048576 }}
{{- end }}
{{- if .pool.kv.disk }}
disk_kv_bytes: {{ mul (include "kvasir.mebibytes" .pool.kv.disk | int64) 1048576 }}
kv_folder: {{ .folder }}
{{- end }}
{{- end -}}

{{/* Seconds that a pod may take to end: the drain, what is still written to the disk, and time for the engine's last
step and for the farewells. */}}
{{- define "kvasir.poolGraceSeconds" -}}
{{- $spill := 0 -}}
{{- if .kv.disk -}}{{- $spill = ternary 10 .settings.spill_seconds (kindIs "invalid" .settings.spill_seconds) -}}{{- end -}}
{{- add .drainSeconds (ceil $spill | int64) 20 -}}
{{- end -}}

{{/* A claim for KV on disk. */}}
{{- define "kvasir.kvClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .kv.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ include "kvasir.kvVolumeSize" . }}
{{- end -}}

{{/* Refuses, with one sentence, pools that cannot work; what concerns one value alone is in the schema. */}}
{{- define "kvasir.checkPools" -}}
{{- $served := dict -}}
{{- range $name, $pool := include "kvasir.pools" . | fromYaml -}}
{{- $model := $pool.model -}}
{{- include "kvasir.checkModel" (dict "name" $name "pool" $pool) -}}
{{- if and (has $pool.engine (list "remote" "openai")) (not $pool.settings.engine_url) -}}
{{- fail (printf "pool %s: engine %s is for servers that run already, so engines must say how they are found" $name $pool.engine) -}}
{{- end -}}
{{- if gt (int $pool.gpu.count) (int $pool.gpu.perNode) -}}
{{- fail (printf "pool %s: a replica is one pod, and would ask for %d GPUs, more than a node has (gpu.perNode is %d): divide the model over fewer, or let engines find servers that span nodes" $name (int $pool.gpu.count) (int $pool.gpu.perNode)) -}}
{{- end -}}
{{- if ne $pool.engine "vllm" -}}
{{- range $setting := list "engine_args" "adapters" "trust_code" -}}
{{- if get $pool.settings $setting -}}
{{- fail (printf "pool %s: settings.%s is for the engine vllm, not for %s" $name $setting $pool.engine) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "kvasir.checkKV" (dict "name" $name "pool" $pool) -}}
{{- include "kvasir.checkScaling" (dict "root" $ "name" $name "scaling" $pool.autoscaling) -}}
{{- $path := include "kvasir.modelPath" $pool -}}
{{- $model_name := default (base $path) $model.name -}}
{{- $block_size := default (ternary 32 16 (eq $pool.engine "vllm")) $pool.settings.block_size | int -}}
{{- $what := printf "%s %s %s with blocks of %d tokens" (base $path) $model.repository (ternary $model.revision "" (eq $model.source "hub")) $block_size -}}
{{- $other := get $served $model_name -}}
{{- if and $other (ne $other.what $what) -}}
{{- fail (printf "pools %s and %s both serve %q, but not the same model in blocks of the same size: give one of them another model.name" $other.pool $name $model_name) -}}
{{- end -}}
{{- $_ := set $served $model_name (dict "pool" $name "what" $what) -}}
{{- end -}}
{{- end -}}

{{/* The same for where a pool's model comes from: dict "name" … "pool" …. */}}
{{- define "kvasir.checkModel" -}}
{{- $model := .pool.model -}}
{{- if and (eq $model.source "hub") (not (contains "/" $model.repository)) -}}
{{- fail (printf "pool %s: model.source is hub, so model.repository must be one such as Qwen/Qwen3-8B, not %q" .name $model.repository) -}}
{{- else if and (eq $model.source "claim") (not (and $model.claim $model.path)) -}}
{{- fail (printf "pool %s: model.source is claim, so model.claim and model.path must be set" .name) -}}
{{- else if and (eq $model.source "image") (not (hasPrefix "/" $model.path)) -}}
{{- fail (printf "pool %s: model.source is image, so model.path must be a directory in the image, not %q" .name $model.path) -}}
{{- end -}}
{{- end -}}

{{/* The same for a pool's KV below the device: dict "name" … "pool" …. */}}
{{- define "kvasir.checkKV" -}}
{{- $kv := .pool.kv -}}
{{- if and $kv.disk (not $kv.memory) -}}
{{- fail (printf "pool %s: kv.disk needs kv.memory, through which KV goes to the disk and back" .name) -}}
{{- else if and $kv.memory (eq .pool.engine "simulated") -}}
{{- fail (printf "pool %s: kv.memory is for the engines torch and vllm, not for simulated" .name) -}}
{{- end -}}
{{- if and .pool.settings.pull_bytes_per_second (not $kv.memory) -}}
{{- fail (printf "pool %s: settings.pull_bytes_per_second needs kv.memory, into which KV is pulled" .name) -}}
{{- end -}}
{{- if $kv.memory -}}
{{- range $kind := list "requests" "limits" -}}
{{- $memory := get (default dict (get $.pool.resources $kind)) "memory" -}}
{{- if and $memory (not (regexMatch "^[0-9]+[KMGT]i$" (toString $memory))) -}}
{{- fail (printf "pool %s: with kv.memory, resources.%s.memory is a whole number of Ki, Mi, Gi or Ti, not %v: kv.memory is added to it" $.name $kind $memory) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The same for how a pool scales: dict "root" $ "name" … "scaling" …. */}}
{{- define "kvasir.checkScaling" -}}
{{- $scaling := .scaling -}}
{{- if not $scaling.enabled -}}
{{- else if and (eq $scaling.by "kuberay") (not (include "kvasir.inRay" .root)) -}}
{{- fail (printf "pool %s: autoscaling.by is kuberay, and its replicas are in a StatefulSet: set it to hpa or keda, or fleet.mode to kuberay" .name) -}}
{{- else if and (ne $scaling.by "kuberay") (include "kvasir.inRay" .root) -}}
{{- fail (printf "pool %s: autoscaling.by %s needs fleet.mode statefulset; in a RayCluster pools scale by kuberay" .name $scaling.by) -}}
{{- else if and (eq $scaling.by "kuberay") (or $scaling.targetQueueSeconds $scaling.targetKvShare) -}}
{{- fail (printf "pool %s: autoscaling.targetQueueSeconds and targetKvShare are for hpa and keda, not for kuberay" .name) -}}
{{- else if and (eq $scaling.by "keda") (not $scaling.prometheus) -}}
{{- fail (printf "pool %s: autoscaling.by is keda, so autoscaling.prometheus must be the address of a Prometheus" .name) -}}
{{- else if not $scaling.minReplicas -}}
{{- include "kvasir.checkZero" . -}}
{{- else if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "pool %s: autoscaling.minReplicas is %d, more than maxReplicas, %d" .name (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- else if not (or $scaling.targetInFlight $scaling.targetPendingTokens $scaling.targetQueueSeconds $scaling.targetKvShare) -}}
{{- fail (printf "pool %s: autoscaling is enabled, but no target says by what" .name) -}}
{{- end -}}
{{- end -}}

{{/* The same for a pool that may have no replica: something must remember its model, and start the first one. */}}
{{- define "kvasir.checkZero" -}}
{{- $redis := .root.Values.redis -}}
{{- if ne .scaling.by "keda" -}}
{{- fail (printf "pool %s: autoscaling.minReplicas is 0, which needs autoscaling.by keda" .name) -}}
{{- else if not .scaling.targetInFlight -}}
{{- fail (printf "pool %s: autoscaling.minReplicas is 0, so targetInFlight must not be: requests that wait start the first replica" .name) -}}
{{- else if not .root.Values.router.settings.wait_for_replica_seconds -}}
{{- fail (printf "pool %s: autoscaling.minReplicas is 0, so router.settings.wait_for_replica_seconds must say how long requests wait for the first replica" .name) -}}
{{- else if and (eq $redis.mode "builtin") (not $redis.builtin.persistence.enabled) -}}
{{- fail (printf "pool %s: autoscaling.minReplicas is 0, so redis.builtin.persistence must be enabled: a Redis that restarts would forget the model while it has no replica" .name) -}}
{{- end -}}
{{- end -}}

{{/* The container that brings a pool's model from a hub, if it comes from there: dict "root" $ "pool" $pool. */}}
{{- define "kvasir.modelDownload" -}}
{{- if eq .pool.model.source "hub" -}}
{{- $model := .pool.model -}}
- name: model
  image: {{ include "kvasir.image" (dict "root" .root "image" .pool.image) }}
  imagePullPolicy: {{ .pool.image.pullPolicy }}
  {{- /* What is there already is not loaded again. */}}
  command:
    - hf
    - download
    - {{ $model.repository | quote }}
    - --revision
    - {{ $model.revision | quote }}
    - --local-dir
    - {{ include "kvasir.modelPath" .pool | quote }}
    {{- if include "kvasir.engines" .pool }}
    {{- /* The servers have the weights. */}}
    {{- range $files := list "*.json" "*.model" "*.jinja" "*.txt" }}
    - --include
    - {{ $files | quote }}
    {{- end }}
    {{- end }}
  securityContext:
    {{- include "kvasir.poolContainerSecurity" .pool | nindent 4 }}
  env:
    {{- include "kvasir.home" . | nindent 4 }}
    {{- with .pool.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $model.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ $model.tokenSecret }}
          key: {{ $model.tokenKey }}
    {{- end }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 4Gi}
  volumeMounts:
    - name: models
      mountPath: /models
    - name: tmp
      mountPath: /tmp
    {{- with .pool.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* All that runs before a replica: dict "root" $ "pool" $pool. */}}
{{- define "kvasir.poolInitContainers" -}}
{{- include "kvasir.modelDownload" . }}
{{- with .pool.extraInitContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What a pool's containers mount, and the volumes of it, but for that of a model from a hub and claims for KV:
dict "root" $ "pool" $pool. */}}
{{- define "kvasir.poolMounts" -}}
- name: tmp
  mountPath: /tmp
{{ include "kvasir.clusterSecretMount" .root }}
{{- if has .pool.model.source (list "hub" "claim") }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .pool.sharedMemory }}
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- if .pool.kv.disk }}
- name: kv
  mountPath: /kv
{{- end }}
{{- include "kvasir.redisMounts" .root }}
{{- include "kvasir.mtlsMounts" .root }}
{{- with .pool.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvasir.poolVolumes" -}}
- name: tmp
  emptyDir: {}
{{ include "kvasir.clusterSecretVolume" .root }}
{{- if eq .pool.model.source "claim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .pool.model.claim }}
    readOnly: true
{{- end }}
{{- with .pool.sharedMemory }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- if .pool.kv.disk }}
{{- if eq .pool.kv.volume "emptyDir" }}
- name: kv
  emptyDir:
    sizeLimit: {{ include "kvasir.kvVolumeSize" .pool }}
{{- else if eq .pool.kv.volume "hostPath" }}
- name: kv
  hostPath:
    path: {{ .pool.kv.hostPath }}
    type: Directory
{{- end }}
{{- end }}
{{- include "kvasir.redisVolumes" .root }}
{{- include "kvasir.mtlsVolumes" (dict "root" .root "side" "replica") }}
{{- with .pool.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
