{{/* How a pool finds servers that run already, as `engines` of a fleet file; empty where it has replicas of its own. */}}
{{- define "kvasir.engines" -}}
{{- $engines := .engines -}}
{{- $namespace := ternary "" (printf "namespace: %s" $engines.namespace) (empty $engines.namespace) -}}
{{- if $engines.service }}
service: {{ $engines.service }}
{{ $namespace }}
{{- with $engines.port }}
port: {{ . | quote }}
{{- end }}
{{- else if $engines.inferencePool }}
inference_pool: {{ $engines.inferencePool }}
{{ $namespace }}
{{- else if $engines.dns }}
dns: {{ $engines.dns | quote }}
{{- else if $engines.urls }}
urls:
  {{- toYaml $engines.urls | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Pools that find servers, with what follows from the rest, as YAML: name → pool. */}}
{{- define "kvasir.findingPools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := default dict .Values.pools -}}
{{- $whole := mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy (default dict $pool)) -}}
{{- if include "kvasir.engines" $whole -}}
{{- $_ := set $whole.image "repository" (default "ghcr.io/kvasir/replica-cpu" $whole.image.repository) -}}
{{- $requests := dict "cpu" "500m" "memory" "1Gi" -}}
{{- $_ := set $whole "resources" (merge (default dict $whole.resources) (dict "requests" $requests "limits" (dict "memory" "8Gi"))) -}}
{{- $_ := set $whole.gpu "count" 0 -}}
{{- $_ := set $pools $name $whole -}}
{{- end -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* Refuses, with one sentence, a pool that cannot find servers: dict "name" … "pool" …. */}}
{{- define "kvasir.checkEngines" -}}
{{- $engines := .pool.engines -}}
{{- $ways := compact (list $engines.service $engines.inferencePool $engines.dns (join " " $engines.urls)) -}}
{{- if gt (len $ways) 1 -}}
{{- fail (printf "pool %s: engines are found by one of service, inferencePool, dns and urls" .name) -}}
{{- else if not (has .pool.engine (list "" "remote" "openai")) -}}
{{- fail (printf "pool %s: beside engines, engine is remote (or empty) or openai, not %s" .name .pool.engine) -}}
{{- else if or .pool.kv.memory .pool.autoscaling.enabled -}}
{{- fail (printf "pool %s: kv and autoscaling are for replicas of its own, and engines finds servers that run already" .name) -}}
{{- end -}}
{{- end -}}

{{/* What `kvasir join` reads: dict "root" $ "name" … "pool" …. */}}
{{- define "kvasir.joinFile" -}}
{{- $values := .root.Values -}}
{{- $pool := .pool -}}
{{- $settings := dict "model" (default "toy" (include "kvasir.modelPath" $pool)) "index_stride" $values.indexStride "log_format" $values.logFormat "log_level" $values.logLevel -}}
{{- if eq $pool.engine "openai" -}}{{- $_ := set $settings "engine" "openai" -}}{{- end -}}
{{- with $pool.model.name -}}{{- $_ := set $settings "model_name" . -}}{{- end -}}
{{- with $pool.engines.keySecret -}}{{- $_ := set $settings "engine_key_file" "/etc/kvasir/engine-key/key" -}}{{- end -}}
{{- if $values.traces.endpoint -}}
{{- $_ := set $settings "otlp_endpoint" $values.traces.endpoint -}}
{{- $_ := set $settings "trace_sample_ratio" $values.traces.sampleRatio -}}
{{- end -}}
{{- $engines := merge (include "kvasir.engines" $pool | fromYaml) (dict "at_most" $pool.engines.atMost) -}}
{{- $entry := dict
    "name" .name
    "engines" $engines
    "settings" (merge $settings (include "kvasir.mtlsReplicaSettings" .root | fromYaml) $pool.settings)
    "drain_seconds" $pool.drainSeconds -}}
{{- if ne $pool.role "both" -}}{{- $_ := set $entry "role" $pool.role -}}{{- end -}}
{{- toYaml (dict "secret_file" "/etc/kvasir/secret/secret" "drain_seconds" $pool.drainSeconds "pools" (list $entry)) -}}
{{- end -}}
