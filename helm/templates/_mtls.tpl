{{/* Whether there is TLS between routers and replicas: "yes" or nothing. Unless the values say, where cert-manager is;
but an upgrade turns nothing on that was off, since for a while some pods would have it and others not. */}}
{{- define "kvasir.mtls" -}}
{{- $said := .Values.mtls.enabled -}}
{{- if not (kindIs "invalid" $said) -}}
{{- if $said -}}yes{{- end -}}
{{- else if .Values.mtls.existingSecrets.router -}}
yes
{{- else if .Capabilities.APIVersions.Has "cert-manager.io/v1" -}}
{{- $certificate := printf "%s-router-tls" (include "kvasir.fullname" .) -}}
{{- if or .Release.IsInstall (lookup "cert-manager.io/v1" "Certificate" .Release.Namespace $certificate) -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* Secret with ca.crt, tls.crt and tls.key of one side: dict "root" $ "side" "router". */}}
{{- define "kvasir.mtlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "kvasir.fullname" .root) .side) (get .root.Values.mtls.existingSecrets .side) -}}
{{- end -}}

{{- define "kvasir.mtlsMounts" -}}
{{- if include "kvasir.mtls" . }}
- name: tls
  mountPath: /etc/kvasir/tls
  readOnly: true
{{- end }}
{{- end -}}

{{/* Mounted as a whole: a file mounted by its own name would not change when its Secret does. */}}
{{- define "kvasir.mtlsVolumes" -}}
{{- if include "kvasir.mtls" .root }}
- name: tls
  secret:
    secretName: {{ include "kvasir.mtlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "kvasir.mtlsRouterSettings" -}}
{{- if include "kvasir.mtls" . }}
{{- include "kvasir.settings" (dict "prefix" "KVASIR_ROUTER_" "settings" (dict
    "replica_tls_ca" "/etc/kvasir/tls/ca.crt"
    "replica_tls_certificate" "/etc/kvasir/tls/tls.crt"
    "replica_tls_key" "/etc/kvasir/tls/tls.key"
    "replica_tls_name" .Values.mtls.replicaName)) }}
{{- end }}
{{- end -}}

{{/* Settings of a replica, as YAML. */}}
{{- define "kvasir.mtlsReplicaSettings" -}}
{{- if include "kvasir.mtls" . -}}
tls_certificate: /etc/kvasir/tls/tls.crt
tls_key: /etc/kvasir/tls/tls.key
tls_client_ca: /etc/kvasir/tls/ca.crt
tls_peer_name: {{ .Values.mtls.replicaName }}
{{- end -}}
{{- end -}}

{{/* How a replica is asked for its health. Kubernetes' own gRPC probe has no certificate to show. */}}
{{- define "kvasir.replicaProbe" -}}
{{- if include "kvasir.mtls" . -}}
exec:
  command: [python, /app/deploy/check_replica.py]
{{- else -}}
grpc: {port: 50051}
{{- end -}}
{{- end -}}

{{/* Refuses, with one sentence, what does not go together. */}}
{{- define "kvasir.checkMtls" -}}
{{- $given := .Values.mtls.existingSecrets -}}
{{- if and (or $given.router $given.replica) (not (and $given.router $given.replica)) -}}
{{- fail "mtls.existingSecrets needs both, router and replica" -}}
{{- else if and $given.router .Values.mtls.certManager.issuerRef.name -}}
{{- fail "mtls.existingSecrets and mtls.certManager.issuerRef exclude each other" -}}
{{- end -}}
{{- end -}}
