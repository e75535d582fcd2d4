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
{{- $resources := dict "cpus" 0 "gpus" $pool.gpu.count "custom" (dict (printf "kvasir-pool-%s" $name) 1) -}}
{{- $pools = append $pools (dict
    "name" $name
    "replicas" $pool.replicas
    "settings" (merge $settings (include "kvasir.mtlsReplicaSettings" $ | fromYaml) $pool.settings)
    "resources" $resources
    "threads" (max 1 (int (default 1 $pool.settings.num_threads)))
    "drain_seconds" $pool.drainSeconds
    "surge" $pool.surge) -}}
{{- $longest = max $longest (int $pool.drainSeconds) -}}
{{- end -}}
{{- toYaml (dict "log_format" $values.logFormat "metrics_host" "0.0.0.0" "metrics_port" 9100 "drain_seconds" $longest "pools" $pools) -}}
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
redisPassword:
  valueFrom:
    secretKeyRef:
      name: {{ include "kvasir.fullname" . }}-redis
      key: password
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
