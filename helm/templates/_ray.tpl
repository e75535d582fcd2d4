{{/* What fleet.yaml says of the pools: `kvasir fleet apply` reads it. A replica has a worker to itself, so all
of them can have the same ports. */}}
{{- define "kvasir.fleetFile" -}}
{{- $values := .Values -}}
{{- $pools := list -}}
{{- $longest := 0 -}}
{{- range $name, $pool := include "kvasir.pools" . | fromYaml -}}
{{- $settings := dict "engine" $pool.engine "model" (default "toy" (include "kvasir.modelPath" $pool)) -}}
{{- if $pool.model.name -}}{{- $_ := set $settings "model_name" $pool.model.name -}}{{- end -}}
{{- $_ := set $settings "port" 50051 -}}
{{- $_ := set $settings "metrics_port" 9100 -}}
{{- $_ := set $settings "index_stride" $values.indexStride -}}
{{- $_ := set $settings "log_format" $values.logFormat -}}
{{- $_ := set $settings "log_level" $values.logLevel -}}
{{- if $values.traces.endpoint -}}
{{- $_ := set $settings "otlp_endpoint" $values.traces.endpoint -}}
{{- $_ := set $settings "trace_sample_ratio" $values.traces.sampleRatio -}}
{{- end -}}
{{- $kv := include "kvasir.kvSettings" (dict "pool" $pool "folder" "/kv") | fromYaml -}}
{{- $resources := dict "cpus" 0 "gpus" $pool.gpu.count "custom" (dict (printf "kvasir-pool-%s" $name) 1) -}}
{{- $entry := dict
    "name" $name
    "settings" (merge $settings (include "kvasir.mtlsReplicaSettings" $ | fromYaml) $kv $pool.settings)
    "resources" $resources
    "threads" (max 1 (int (default 1 $pool.settings.num_threads)))
    "drain_seconds" $pool.drainSeconds
    "surge" $pool.surge -}}
{{- if ne $pool.role "both" -}}{{- $_ := set $entry "role" $pool.role -}}{{- end -}}
{{- if $pool.autoscaling.enabled -}}
{{- $_ := set $entry "autoscaling" (include "kvasir.fleetAutoscaling" $pool.autoscaling | fromYaml) -}}
{{- else -}}
{{- $_ := set $entry "replicas" $pool.replicas -}}
{{- end -}}
{{- $pools = append $pools $entry -}}
{{- $longest = max $longest (int $pool.drainSeconds) -}}
{{- end -}}
{{- $fleet := dict "secret_file" "/etc/kvasir/secret/secret" "log_format" $values.logFormat "metrics_host" "0.0.0.0" "metrics_port" 9100 "drain_seconds" $longest "pools" $pools -}}
{{- if include "kvasir.rayScales" . -}}{{- $_ := set $fleet "ray_autoscaler" true -}}{{- end -}}
{{- toYaml $fleet -}}
{{- end -}}

{{/* How a pool of fleet.yaml scales. Its `replicas` are left out: it begins with the fewest. */}}
{{- define "kvasir.fleetAutoscaling" -}}
min: {{ .minReplicas }}
max: {{ .maxReplicas }}
{{- with .targetInFlight }}
target_in_flight: {{ . }}
{{- end }}
{{- with .targetPendingTokens }}
target_pending_tokens: {{ . }}
{{- end }}
up_seconds: {{ .upSeconds }}
down_seconds: {{ .downSeconds }}
tolerance: {{ .tolerance }}
{{- end -}}

{{/* Whether any pool scales, so that Ray's autoscaler is needed. */}}
{{- define "kvasir.rayScales" -}}
{{- range $name, $pool := include "kvasir.pools" . | fromYaml -}}
{{- if $pool.autoscaling.enabled -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* Workers of a pool at least and at most: dict "root" $ "pool" $pool. Ray's autoscaler brings those for a
rollout when they are needed; without it they are kept. */}}
{{- define "kvasir.workers" -}}
{{- $pool := .pool -}}
{{- $least := ternary $pool.autoscaling.minReplicas $pool.replicas $pool.autoscaling.enabled -}}
{{- $most := add (ternary $pool.autoscaling.maxReplicas $pool.replicas $pool.autoscaling.enabled) $pool.surge -}}
{{- if not (include "kvasir.rayScales" .root) -}}{{- $least = $most -}}{{- end -}}
replicas: {{ $least }}
minReplicas: {{ $least }}
maxReplicas: {{ $most }}
{{- end -}}

{{/* Ray's autoscaler, a container that KubeRay puts beside Ray's head with the same image. Of all containers only
this one gets a token of Kubernetes. */}}
{{- define "kvasir.rayAutoscaler" -}}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ .Values.ray.autoscaler.idleSeconds }}
  imagePullPolicy: {{ .Values.ray.image.pullPolicy }}
  securityContext:
    {{- include "kvasir.containerSecurity" . | nindent 4 }}
  env:
    {{- include "kvasir.rayEnvironment" . | nindent 4 }}
  resources:
    {{- toYaml .Values.ray.autoscaler.resources | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: kubernetes-token
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
{{- end -}}

{{/* What Kubernetes would mount into every container of a pod that may have a token. */}}
{{- define "kvasir.kubernetesToken" -}}
- name: kubernetes-token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3607
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end -}}

{{/* Environment of everything that Ray runs in: machines that are gone are noticed within seconds. */}}
{{- define "kvasir.rayEnvironment" -}}
{{- include "kvasir.home" . }}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_health_check_initial_delay_ms
  value: "1000"
- name: RAY_health_check_period_ms
  value: "500"
- name: RAY_health_check_timeout_ms
  value: "1000"
- name: RAY_health_check_failure_threshold
  value: "3"
{{- end -}}

{{/* Where Ray's control service keeps its state. */}}
{{- define "kvasir.rayFaultTolerance" -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "builtin" -}}
redisAddress: {{ include "kvasir.fullname" . }}-redis:6379
redisUsername:
  value: ray
redisPassword:
  valueFrom:
    secretKeyRef:
      name: {{ include "kvasir.fullname" . }}-redis
      key: ray-password
{{- else if $external.urlSecret -}}
{{- fail "ray.faultTolerance needs redis.external.host and its fellows: from redis.external.urlSecret Ray cannot read where Redis is" -}}
{{- else -}}
redisAddress: {{ printf "%s%s:%d" (ternary "rediss://" "" $external.tls.enabled) $external.host (int $external.port) | quote }}
{{- if $external.username }}
redisUsername:
  value: {{ $external.username | quote }}
{{- end }}
{{- if $external.passwordSecret }}
redisPassword:
  valueFrom:
    secretKeyRef:
      name: {{ $external.passwordSecret }}
      key: {{ $external.passwordKey }}
{{- end }}
{{- end -}}
{{- end -}}
