{{/* How a pool scales, with targets that follow its role where they are not set. */}}
{{- define "kvasir.roleTargets" -}}
{{- $in_ray := eq .autoscaling.by "kuberay" -}}
{{- $targets := dict "targetInFlight" 16 "targetPendingTokens" 0 "targetQueueSeconds" 0 "targetKvShare" 0 -}}
{{- if eq .role "prefill" -}}
{{- $targets = dict "targetInFlight" 0 "targetPendingTokens" (ternary 8192 0 $in_ray) "targetQueueSeconds" (ternary 0 0.5 $in_ray) "targetKvShare" 0 -}}
{{- else if eq .role "decode" -}}
{{- $_ := set $targets "targetKvShare" (ternary 0 0.8 $in_ray) -}}
{{- end -}}
{{- $scaling := deepCopy .autoscaling -}}
{{- range $name, $target := $targets -}}
{{- if kindIs "invalid" (index $scaling $name) -}}{{- $_ := set $scaling $name $target -}}{{- end -}}
{{- end -}}
{{- toYaml $scaling -}}
{{- end -}}

{{/* Whether any pool is to scale by hpa or keda. */}}
{{- define "kvasir.scaledSets" -}}
{{- range $pool := include "kvasir.pools" . | fromYaml -}}
{{- if and $pool.autoscaling.enabled (ne $pool.autoscaling.by "kuberay") -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a pool scales by, as a YAML list of `name`, `query`, `target`, and `kind` as Kubernetes calls it: dict "root" $
"name" … "pool" …. Requests that wait in routers are the model's, and count in equal parts for its pools. Series of
other releases in the namespace are left out by the names of pods. */}}
{{- define "kvasir.measures" -}}
{{- $scaling := .pool.autoscaling -}}
{{- $fullname := include "kvasir.fullname" .root -}}
{{- $replicas := printf `namespace="%s",replica=~"%s-pool-%s-[0-9]+"` .root.Release.Namespace $fullname .name -}}
{{- $model := include "kvasir.modelName" .pool -}}
{{- $routers := printf `namespace="%s",router=~"%s-router-.+",model="%s"` .root.Release.Namespace $fullname $model -}}
{{- $num_pools := 0 -}}
{{- range $other := include "kvasir.pools" .root | fromYaml -}}
{{- if eq (include "kvasir.modelName" $other) $model -}}{{- $num_pools = add1 $num_pools -}}{{- end -}}
{{- end -}}
{{- $part := ternary "" (printf " / %d" $num_pools) (eq $num_pools 1) -}}
{{- $tokens := printf "((sum(replica_pending_tokens{%s}) or vector(0)) + (sum(router_unplaced_tokens{%s}) or vector(0))%s)" $replicas $routers $part -}}
{{- with $scaling.targetInFlight }}
- name: in_flight
  query: {{ printf "(sum(replica_open_sequences{%s}) or vector(0)) + (sum(router_unplaced_requests{%s}) or vector(0))%s" $replicas $routers $part | squote }}
  target: {{ . }}
  kind: AverageValue
{{- end }}
{{- with $scaling.targetPendingTokens }}
- name: pending_tokens
  query: {{ $tokens | squote }}
  target: {{ . }}
  kind: AverageValue
{{- end }}
{{- with $scaling.targetQueueSeconds }}
- name: queue_seconds
  query: {{ printf "%s * (avg(replica_prefill_seconds_per_token{%s}) or vector(0))" $tokens $replicas | squote }}
  target: {{ . }}
  kind: AverageValue
{{- end }}
{{- with $scaling.targetKvShare }}
- name: kv_share
  query: {{ printf "avg(replica_used_blocks{%s} / (replica_total_blocks{%s} > 0)) or vector(0)" $replicas $replicas | squote }}
  target: {{ . }}
  kind: Value
{{- end }}
{{- end -}}

{{/* The name of a pool's model in metrics. */}}
{{- define "kvasir.modelName" -}}
{{- default (base (default "toy_model" (include "kvasir.modelPath" .))) .model.name -}}
{{- end -}}

{{/* How fast a StatefulSet grows and shrinks. One replica goes at a time: each takes a cache with it. */}}
{{- define "kvasir.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: {{ min 3600 (ceil .upSeconds | int) }}
scaleDown:
  stabilizationWindowSeconds: {{ min 3600 (ceil .downSeconds | int) }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: 60
{{- end -}}

{{/* The number of replicas of a StatefulSet or a Deployment. None where an autoscaler sets it; but a field that goes
would be reset to 1, so an upgrade keeps the number that there is: dict "root" $ "kind" … "name" … "values" …. */}}
{{- define "kvasir.size" -}}
{{- if not .values.autoscaling.enabled -}}
replicas: {{ .values.replicas }}
{{- else -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace .name -}}
{{- if hasKey (default dict $live.spec) "replicas" -}}
replicas: {{ $live.spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}
