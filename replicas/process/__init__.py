"""Shared by every process, router and replica: settings, logs, secret and TLS files, traces.

Settings are one frozen dataclass per process, built once: YAML file < environment < flags. Unknown keys are
errors.

TLS between routers and replicas is optional, and mutual if a replica names the CA of its routers. Replicas
are found by address, but all share one certificate name. Certificates carry no roles: any certificate of the
CA is let in, so the CA must be private and used for nothing else. Both sides reread their files for each new
connection, keep the last good ones if the new ones are broken, and cut no stream. A replica with which no
connection succeeds is never routed to; the log says why once, and the router tries again.
"""
