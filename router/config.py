"""RouterConfig: every setting of a router process, and the only place with its defaults.

Knows no environment and no file: `replicas/process/settings.py` reads those.
"""

from dataclasses import dataclass

from replicas.process.settings import (
    SettingsError,
    check_log_settings,
    check_secret_settings,
    check_trace_settings,
    secret_setting,
    setting,
)
from router.shared.origins import may_be_origin, means_loopback

ENVIRONMENT_PREFIX = "KVASIR_ROUTER_"
FROM_ZERO = (
    "room_price",
    "delay_price",
    "wait_seconds",
    "queue_target_seconds",
    "queue_seconds",
    "max_queued",
    "max_waiting",
    "max_waiting_bytes",
    "tokenizer_cache_bytes",
    "hash_cache_bytes",
    "history_bytes",
    "all_history_bytes",
    "explain_bytes",
    "tool_gap_seconds",
    "max_caches",
    "all_caches_bytes",
    "cache_memory_bytes",
    "max_responses",
    "all_responses_bytes",
    "response_memory_bytes",
    "usage_hours",
    "drain_seconds",
)

AT_LEAST_ONE = (
    "processes",
    "max_body_bytes",
    "max_in_flight",
    "max_sequences",
    "max_tokens_in_flight",
    "max_connections",
    "upload_bytes_per_second",
    "max_choices",
    "max_prompts",
    "index_stride",
    "max_cache_bytes",
)
ADMIN_ACCESS = ("loopback", "everyone", "nobody")


@dataclass(frozen=True)
class RouterConfig:
    host: str = setting("127.0.0.1", help="address to listen on for HTTP")
    port: int = setting(8000, help="HTTP port; 0 takes a free one")
    processes: int = setting(
        1, help="number of router processes that share the port; limits apply to each of them"
    )
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0", help="Redis that holds the registry and the block index"
    )
    secret: str | None = secret_setting("cluster secret as hex digits (16 to 64 bytes), the same for all")
    secret_file: str | None = setting(
        None,
        help="file with the cluster secret; of several lines the first is in force and the others "
        "are accepted, too; without secret and file, each router makes its own when it starts",
    )

    keys_file: str | None = setting(
        None,
        help="file of tenants and their API keys, as `kvasir keys` writes it; read again when it changes",
    )

    keys_in_redis: bool = setting(
        False,
        help="whether tenants and their API keys are in Redis instead, where `kvasir keys` can put "
        "them sealed under the cluster secret",
    )
    open: bool = setting(
        False,
        help="whether a router without keys may listen on other addresses than loopback: everyone who "
        "reaches it is then one and the same tenant",
    )

    policy: str = setting("kvasir", help="how replicas are chosen; the others are baselines to compare with")
    room_price: float = setting(
        3.0,
        help="price of computing a prompt into a full cache, as a multiple of that computation; 0 ignores it",
    )
    delay_price: float = setting(
        0.05,
        help="price of a prompt's computation for each request that it delays, as a share of the "
        "computation; 0 ignores it",
    )
    index_stride: int = setting(
        128, help="the index keeps one block hash per this many tokens; must be the same as the replicas'"
    )
    poll_seconds: float = setting(0.5, help="time between two reads of the registry of replicas")
    replica_tls_ca: str | None = setting(
        None,
        help="PEM file with the CA of the replicas' certificates; with it, connections to replicas use TLS",
    )
    replica_tls_certificate: str | None = setting(
        None, help="PEM file with this router's certificate, for replicas that require one"
    )
    replica_tls_key: str | None = setting(
        None, help="PEM file with the key of that certificate, not encrypted"
    )
    replica_tls_name: str = setting(
        "kvasir-replica", help="DNS name in the replicas' certificates, wherever the replicas run"
    )

    max_body_bytes: int = setting(8 * 2**20, help="maximum size of a request body; larger ones get 413")
    upload_seconds: float = setting(60.0, help="maximum time for a request to arrive; slower bodies get 408")
    upload_bytes_per_second: int = setting(
        1024, help="minimum pace of a request body after its first five seconds; slower ones get 408"
    )
    body_memory_bytes: int = setting(
        256 * 2**20,
        help="memory for all request bodies that are being read or prepared; beyond it, requests get 503",
    )
    image_memory_bytes: int = setting(
        2**30,
        help="memory for the images of all requests being served, which are kept until these end, since "
        "another replica may need them; beyond it, requests with images get 503",
    )
    stream_comment_seconds: float = setting(
        15.0,
        help="maximum silence of a stream; then the router sends a comment, which clients "
        "skip and proxies see",
    )
    max_in_flight: int = setting(4096, help="maximum number of requests in flight; more get 429")
    max_sequences: int = setting(
        8192, help="maximum number of sequences (prompts times n) in flight, over all requests; more get 429"
    )
    max_tokens_in_flight: int = setting(
        16 * 2**20,
        help="maximum number of tokens in flight: of prompts, and up to 1,024 of each answer; more get 429",
    )
    wait_seconds: float = setting(
        15.0,
        help="maximum wait while a model has no ready replica but some are starting; then requests get 503",
    )
    overdue_seconds: float = setting(
        60.0,
        help="a request moves to another replica if its replica computes nothing for this long, or "
        "for twenty of its steps, whichever is longer",
    )
    max_waiting: int = setting(2048, help="maximum number of requests that wait for a replica; more get 503")
    max_waiting_bytes: int = setting(
        256 * 2**20,
        help="memory for the prompts of requests that wait for a replica; beyond it, requests get 503",
    )
    queue_target_seconds: float = setting(
        0.25,
        help="in an overload, prompts that a replica may have and still get more; what it could not begin "
        "soon is held until then, in fair order over tenants",
    )
    queue_seconds: float = setting(
        1.0,
        help="maximum time for which a request without a deadline is held in an overload, unless its own "
        "prompt takes longer; then, or if more is expected, it gets 429",
    )
    max_queued: int = setting(4096, help="maximum number of requests that are held; more get 429")
    max_connections: int = setting(8192, help="maximum number of client connections; more get 503")
    address_share: float = setting(
        0.5,
        help="share of the connections, of the requests in flight, and of the memory for bodies "
        "that one client address may use; 1 if all clients come from one address, as behind a "
        "load balancer",
    )
    head_seconds: float = setting(
        10.0,
        help="maximum time for a request's headers to arrive, and for a new connection to "
        "send its first ones",
    )
    write_seconds: float = setting(
        30.0, help="maximum time for which a client may read nothing of its answer; then it is disconnected"
    )
    max_choices: int = setting(16, help="maximum number of choices (n) per prompt")
    max_prompts: int = setting(128, help="maximum number of prompts in one completions request")
    max_caches: int = setting(1024, help="maximum number of named caches in the cluster; 0 refuses them")
    max_cache_bytes: int = setting(2**20, help="maximum size of what a named cache begins with, as JSON")
    all_caches_bytes: int = setting(
        64 * 2**20, help="room in Redis for all named caches; beyond it, new ones get 429"
    )
    cache_memory_bytes: int = setting(
        32 * 2**20, help="memory for the named caches that were used lately, per router"
    )
    max_responses: int = setting(
        4096, help="maximum number of stored responses per tenant, the oldest go first; 0 stores none"
    )
    all_responses_bytes: int = setting(
        64 * 2**20,
        help="room in Redis for the stored responses of a tenant; one may have a 64th of it",
    )
    response_memory_bytes: int = setting(
        64 * 2**20, help="memory for responses that have yet to be stored, per router"
    )
    response_seconds: float = setting(86_400.0, help="time for which a response is stored")
    usage_hours: int = setting(
        744, help="hours for which it is kept in Redis what each tenant and key has used; 0 counts nothing"
    )
    usage_ratios: tuple[str, ...] = setting(
        (),
        help="costs of a token beside a plain one of a prompt (read=0.05, write_1h=2, output=4, or of one "
        "tenant, acme:read=0.02), where they are not those that the documentation names",
    )
    record_bodies: str | None = setting(
        None,
        help="file to which request bodies are appended for `kvasir lint`, as clients have written them; "
        "for this user alone",
    )
    record_bodies_bytes: int = setting(
        2**30, help="maximum size of that file; beyond it, bodies are not recorded"
    )
    client_priority: bool = setting(
        False,
        help="whether a request's priority counts (lower goes first); by default it is ignored, "
        "because any client could go before all others",
    )
    tokenizer_cache_bytes: int = setting(64 * 2**20, help="memory for encoded text, per model")
    hash_cache_bytes: int = setting(
        32 * 2**20, help="memory for block hashes of earlier prompts, for all models"
    )
    history_bytes: int = setting(
        64 * 2**20,
        help="memory for the tokens of answered conversations, so that their next turns go on from them; 0 "
        "remembers none",
    )
    all_history_bytes: int = setting(
        64 * 2**20,
        help="room in Redis for the tokens of all answers, from which conversations go on at any router; "
        "the oldest of those tenants that hold most go first; 0 leaves them to each router's memory",
    )
    history_seconds: float = setting(
        3600.0, help="time after a conversation's last turn for which its answers' tokens are in Redis"
    )
    history_wait_seconds: float = setting(
        0.02,
        help="maximum wait of a request for what other routers have answered in its conversation; while "
        "Redis is slower, none waits",
    )
    explain_bytes: int = setting(
        64 * 2**20,
        help="memory for what is kept of requests to explain their misses: hashes, counts and "
        "positions, some KiB for each; 0 keeps nothing",
    )
    tool_gap_seconds: int = setting(
        300,
        help="longest time for which a prompt is kept while the tools run that its answer is likely to call, "
        "as long as such calls have taken so far; 0 keeps none for that",
    )
    drain_seconds: int = setting(30, help="maximum wait for running requests on SIGTERM")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        help="host names that clients may call the router by, on whichever address, besides localhost and "
        "the address itself; without any a router on loopback accepts no others, one on another address all",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        help="origins (https://chat.example.org) of pages whose visitors' browsers may call the API; "
        "* allows every page",
    )
    admin_access: str = setting(
        "loopback",
        help="which clients may see the live page, its data, and explanations: loopback, everyone or nobody",
    )
    admin_port: int | None = setting(
        None,
        help="separate port for the live page, explanations and /metrics, which the HTTP port then "
        "does not serve; 0 takes a free one; several processes take this port and the "
        "following ones",
    )
    admin_host: str = setting("127.0.0.1", help="address to listen on for the admin port")
    admin_socket: str | None = setting(
        None,
        help="path of a Unix socket instead of the admin port, which only this user can open; "
        "several processes append .0, .1 and so on",
    )

    log_format: str = setting("text", help="text, or json: one object per line")
    log_level: str = setting("info", help="debug, info, warning or error")
    log_requests: bool = setting(False, help="one line in the log for each request, at its end")
    otlp_endpoint: str | None = setting(
        None, help="OpenTelemetry collector for traces, such as http://127.0.0.1:4318; none means no traces"
    )
    trace_sample_ratio: float = setting(
        1.0, help="share of requests that are traced, unless the caller's traceparent decides"
    )

    @property
    def has_admin_listener(self) -> bool:
        """Several processes always have one: what the port that they share answered would be anyone's."""
        return self.admin_port is not None or self.admin_socket is not None or self.processes > 1

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return self.keys_file is not None or self.keys_in_redis

    def __post_init__(self) -> None:
        self._check_keys()
        if not 0 <= self.port < 2**16:
            raise SettingsError(f"setting port must be between 0 and 65535, not {self.port}")
        if self.admin_port is not None and not 0 <= self.admin_port < 2**16:
            raise SettingsError(f"setting admin_port must be between 0 and 65535, not {self.admin_port}")
        if self.admin_port is not None and self.admin_socket is not None:
            raise SettingsError("settings admin_port and admin_socket cannot be used together")
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise SettingsError(f"setting {name} must be at least 1")
        for name in FROM_ZERO:
            if getattr(self, name) < 0:
                raise SettingsError(f"setting {name} must not be negative")
        for name in (
            "poll_seconds",
            "overdue_seconds",
            "upload_seconds",
            "head_seconds",
            "write_seconds",
            "stream_comment_seconds",
            "response_seconds",
            "history_seconds",
            "history_wait_seconds",
        ):
            if not getattr(self, name) > 0:
                raise SettingsError(f"setting {name} must be positive")
        if not 0 < self.address_share <= 1:
            raise SettingsError(
                f"setting address_share must be above 0 and at most 1, not {self.address_share}"
            )
        if self.body_memory_bytes * self.address_share < self.max_body_bytes:
            raise SettingsError("setting body_memory_bytes, times address_share, must allow max_body_bytes")
        if self.image_memory_bytes * self.address_share < self.max_body_bytes:
            raise SettingsError("setting image_memory_bytes, times address_share, must allow max_body_bytes")
        if (self.replica_tls_certificate is None) != (self.replica_tls_key is None):
            raise SettingsError("settings replica_tls_certificate and replica_tls_key go together")
        if self.replica_tls_certificate is not None and self.replica_tls_ca is None:
            raise SettingsError("setting replica_tls_certificate needs replica_tls_ca")
        if not self.replica_tls_name:
            raise SettingsError("setting replica_tls_name must not be empty")
        if self.admin_access not in ADMIN_ACCESS:
            raise SettingsError(f"setting admin_access must be one of {', '.join(ADMIN_ACCESS)}")
        for origin in self.cors_origins:
            if not may_be_origin(origin):
                raise SettingsError(
                    f"setting cors_origins takes origins as browsers name them (https://chat.example.org), "
                    f"or *, not {origin!r}"
                )
        check_secret_settings(self.secret, self.secret_file)
        check_log_settings(self.log_format, self.log_level)
        check_trace_settings(self.otlp_endpoint, self.trace_sample_ratio)

    def _check_keys(self) -> None:
        if self.keys_file is not None and self.keys_in_redis:
            raise SettingsError("settings keys_file and keys_in_redis cannot be used together")
        if self.keys_in_redis and self.secret is None and self.secret_file is None:
            raise SettingsError("setting keys_in_redis needs the cluster secret: set secret_file")
        if self.open and self.has_keys:
            raise SettingsError("setting open is for a router without keys, and this one has some")
        if not (self.has_keys or self.open or means_loopback(self.host)):
            raise SettingsError(
                f"without API keys the router does not listen on {self.host}, where everyone who reaches it "
                "would be one tenant: set keys_file (`kvasir keys create` makes keys), or open to have it so"
            )
