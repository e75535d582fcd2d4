{{/* Merges an overlay into an object, in place: dict "into" … "over" …. Null takes a field away. Lists whose items
have a mountPath, a name or a groupName are merged by it, as Kubernetes does; other lists are replaced. */}}
{{- define "kvasir.overlay" -}}
{{- $into := .into -}}
{{- range $name, $value := .over -}}
{{- $old := get $into $name -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $into $name -}}
{{- else if and (kindIs "map" $old) (kindIs "map" $value) -}}
{{- include "kvasir.overlay" (dict "into" $old "over" $value) -}}
{{- else if and (kindIs "slice" $old) (kindIs "slice" $value) -}}
{{- $key := include "kvasir.overlayKey" (list $old $value) -}}
{{- $items := ternary $old list (ne $key "") -}}
{{- range $item := $value -}}
{{- $mine := dict -}}
{{- if $key -}}
{{- range $items -}}{{- if eq (get . $key) (get $item $key) -}}{{- $mine = . -}}{{- end -}}{{- end -}}
{{- end -}}
{{- if $mine -}}
{{- include "kvasir.overlay" (dict "into" $mine "over" $item) -}}
{{- else -}}
{{- $items = append $items $item -}}
{{- end -}}
{{- end -}}
{{- $_ := set $into $name $items -}}
{{- else -}}
{{- $_ := set $into $name $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The field by which two lists are merged; empty if there is none. */}}
{{- define "kvasir.overlayKey" -}}
{{- $key := "" -}}
{{- range $name := list "groupName" "name" "mountPath" -}}
{{- $is_key := true -}}
{{- range $items := $ -}}{{- range $items -}}
{{- if kindIs "map" . -}}{{- if not (hasKey . $name) -}}{{- $is_key = false -}}{{- end -}}{{- else -}}{{- $is_key = false -}}{{- end -}}
{{- end -}}{{- end -}}
{{- if $is_key -}}{{- $key = $name -}}{{- end -}}
{{- end -}}
{{- $key -}}
{{- end -}}

{{/* Merges the overlays of these keys into an object or a pod's template, in place, and notes that they were used:
dict "overlays" … "keys" … "seen" (dict) "object" …. Refuses one that changes what the chart finds its objects by. */}}
{{- define "kvasir.applyOverlays" -}}
{{- range $key := .keys -}}
{{- $_ := set $.seen $key true -}}
{{- with get $.overlays $key -}}
{{- $before := include "kvasir.identity" $.object -}}
{{- include "kvasir.overlay" (dict "into" $.object "over" (deepCopy .)) -}}
{{- if ne $before (include "kvasir.identity" $.object) -}}
{{- fail (printf "overlays.%s changes what is the chart's own: an object's kind, name, namespace, selector or selecting labels, or a setting (KVASIR_…)" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What no overlay may change, of an object or a pod's template, as JSON. */}}
{{- define "kvasir.identity" -}}
{{- $meta := default dict .metadata -}}
{{- $labels := pick (default dict $meta.labels) "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "kvasir/pool" -}}
{{- $spec := default dict .spec -}}
{{- $settings := list -}}
{{- range (default $spec (dig "template" "spec" dict $spec)).containers -}}
{{- range .env -}}
{{- if regexMatch "^KVASIR_(ROUTER|REPLICA)_" (toString .name) -}}{{- $settings = append $settings . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- list .apiVersion .kind $meta.name $meta.namespace $labels $spec.selector $settings | toJson -}}
{{- end -}}

{{/* Templates of the pods that an object makes, of a Pod itself: applies their overlays, with the same dict. */}}
{{- define "kvasir.applyPodOverlays" -}}
{{- $pods := list -}}
{{- if eq .object.kind "Pod" -}}
{{- $pods = list .object -}}
{{- else if has .object.kind (list "Deployment" "StatefulSet") -}}
{{- $pods = list .object.spec.template -}}
{{- else if eq .object.kind "RayCluster" -}}
{{- $pods = list .object.spec.headGroupSpec.template -}}
{{- range .object.spec.workerGroupSpecs -}}{{- $pods = append $pods .template -}}{{- end -}}
{{- end -}}
{{- range $pod := $pods -}}
{{- $component := get $pod.metadata.labels "app.kubernetes.io/component" -}}
{{- $keys := include "kvasir.overlayKeys" (dict "kind" "Pod" "name" $component "labels" $pod.metadata.labels) | fromYamlArray -}}
{{- include "kvasir.applyOverlays" (dict "overlays" $.overlays "seen" $.seen "keys" $keys "object" $pod) -}}
{{- end -}}
{{- end -}}

{{/* Names under which an object has overlays, the broadest first: dict "kind" … "name" … "labels" …. */}}
{{- define "kvasir.overlayKeys" -}}
- {{ .kind }}
{{- with get .labels "kvasir/pool" }}
- {{ $.kind }}/pool
- {{ $.kind }}/pool-{{ . }}
{{- else }}
- {{ .kind }}/{{ .name }}
{{- end }}
{{- end -}}
