{{/* Who the built-in Redis lets in: dict user → password. Routers read, take ids of replicas that are gone from
the list, and keep named caches, responses, answers' tokens and what was used; replicas write what is Kvasir's; Ray
keeps its state, and reads nothing of ours. Routers and replicas have the commands that they use and no others: no user
may change the server, empty it, or run scripts, which would stop it, and only Ray may list the names of keys. */}}
{{- define "kvasir.redisAccess" -}}
user default off
{{- with .router }}
user router on >{{ . }} resetchannels %R~kvasir:* %W~kvasir:*:replicas +ping +select +time +watch +unwatch +multi +exec +smembers +scard +sscan +smismember +srem +hmget +exists +xinfo|stream +xread +xrevrange (resetchannels ~kvasir-caches:* ~kvasir-responses:* +get +mget +set +del +zadd +zrem +zrangebyscore +zrevrangebyscore +zremrangebyscore +pexpire +watch) (resetchannels ~kvasir-usage:* +set +hset +hgetall +sadd +smembers +expire +watch) (resetchannels ~kvasir-limits:* ~kvasir-stories:* ~kvasir-programs:* +xadd +xrange +xread +expire) (resetchannels ~kvasir-history:* +get +mget +set +del +incrby +zadd +zrem +zrange +zrangebyscore +sadd +srem +smembers +pexpire)
{{- end }}
{{- with .replica }}
user replica on >{{ . }} resetchannels ~kvasir:* +select +info +watch +unwatch +multi +exec +get +set +incrby +del +unlink +type +rename +pexpire +sadd +srem +smembers +sismember +smismember +scard +hget +hmget +hset +xadd +xlen +xtrim +xinfo|stream +memory|usage
{{- end }}
{{- with .ray }}
user ray on >{{ . }} resetchannels ~RAY* ~DUMMY +@all -@admin -@dangerous -@scripting +info +keys
{{- end }}
{{- end -}}

{{/* The users that there are, as a YAML list. */}}
{{- define "kvasir.redisUsers" -}}
- router
- replica
{{- if and (include "kvasir.inRay" .) .Values.ray.faultTolerance }}
- ray
{{- end }}
{{- end -}}

{{/* How Redis is reached: environment variables, dict "root" $ "user" "router" "prefix" "KVASIR_ROUTER_". Kubernetes puts the
password into the address, so that the address is in no object but the Secret. */}}
{{- define "kvasir.redisEnvironment" -}}
{{- $redis := .root.Values.redis -}}
{{- $external := $redis.external -}}
{{- if eq $redis.mode "builtin" -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "kvasir.fullname" .root }}-redis
      key: {{ .user }}-password
- name: {{ .prefix }}REDIS_URL
  value: redis://{{ .user }}:$(REDIS_PASSWORD)@{{ include "kvasir.fullname" .root }}-redis:6379/0
{{- else if $external.urlSecret -}}
- name: {{ .prefix }}REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $external.urlSecret }}
      key: {{ $external.urlKey }}
{{- else -}}
{{- $user := $external.username -}}
{{- if $external.passwordSecret -}}
{{- $user = printf "%s:$(REDIS_PASSWORD)@" $user -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $external.passwordSecret }}
      key: {{ $external.passwordKey }}
{{ else if $user -}}
{{- $user = printf "%s@" $user -}}
{{- end -}}
{{- $scheme := ternary "rediss" "redis" $external.tls.enabled -}}
{{- $query := ternary "?ssl_ca_certs=/etc/kvasir/redis-ca/ca.crt" "" (eq "yes" (include "kvasir.hasRedisCA" .root)) -}}
- name: {{ .prefix }}REDIS_URL
  value: {{ printf "%s://%s%s:%d/%d%s" $scheme $user $external.host (int $external.port) (int $external.database) $query | quote }}
{{- end -}}
{{- end -}}

{{- define "kvasir.hasRedisCA" -}}
{{- $tls := .Values.redis.external.tls -}}
{{- if and (eq .Values.redis.mode "external") $tls.enabled $tls.caSecret -}}yes{{- end -}}
{{- end -}}

{{- define "kvasir.redisMounts" -}}
{{- if include "kvasir.hasRedisCA" . }}
- name: redis-ca
  mountPath: /etc/kvasir/redis-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "kvasir.redisVolumes" -}}
{{- if include "kvasir.hasRedisCA" . }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.external.tls.caSecret }}
    items:
      - key: {{ .Values.redis.external.tls.caKey }}
        path: ca.crt
{{- end }}
{{- end -}}
