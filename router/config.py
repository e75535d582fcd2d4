"""RouterConfig: every setting of a router process, and the only place with its defaults.

Knows no environment and no file: `replicas/process/settings.py` reads those.
"""

from collections.abc import Callable
from dataclasses import dataclass

from replicas.process.settings import (
    SettingsError,
    check_bounds,
    check_log_settings,
    check_secret_settings,
    check_trace_settings,
    fill_old_settings,
    old_setting,
    secret_setting,
    setting,
)
from router.shared.origins import may_be_origin, means_loopback

ENVIRONMENT_PREFIX = "KVASIR_ROUTER_"
ADMIN_ACCESS = ("loopback", "everyone", "nobody")
CAN_BE_OFF = (
    *("caches", "responses", "history", "shared_history", "explain", "tool_gaps"),
    *("programs", "program_admission"),
)

MEMORY = "set memory_bytes"
REDIS = "set redis_bytes"
IN_FLIGHT = "set max_in_flight, which it follows"


def _memory(num_64ths: int) -> "Callable[[RouterConfig], int]":
    """Return the share of `memory_bytes`, of which six 64ths are left for tokenizers of more models."""
    return lambda config: config.memory_bytes * num_64ths // 64


def _redis(divisor: int) -> "Callable[[RouterConfig], int]":
    return lambda config: config.redis_bytes // divisor


def _unless_off(feature: str, default: "Callable[[RouterConfig], int]") -> "Callable[[RouterConfig], int]":
    return lambda config: 0 if feature in config.off else default(config)


@dataclass(frozen=True)
class RouterConfig:
    host: str = setting("127.0.0.1", help="address to listen on for HTTP")
    port: int = setting(8000, help="HTTP port; 0 takes a free one")
    processes: int = setting(
        1, help="number of router processes that share the port; limits apply to each of them", minimum=1
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

    policy: str = setting("kvasir", help="how replicas are chosen; the others are there to compare with")
    room_price: float = setting(
        3.0,
        help="price of computing a prompt into a full cache, as a multiple of that computation; 0 ignores it",
        minimum=0,
    )
    index_stride: int = setting(
        128,
        help="the index keeps one block hash per this many tokens; must be the same as the replicas'",
        minimum=1,
    )
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

    memory_bytes: int = setting(
        2 * 2**30,
        help="memory of a router process: a half for the images of requests, an eighth for bodies that are "
        "read, an eighth for prompts that wait, the rest for caches, answered conversations, responses yet "
        "to be stored and explanations; requests beyond one of the first three get 503",
        minimum=1,
    )
    redis_bytes: int = setting(
        192 * 2**20,
        help="room in Redis for what all routers keep: a third for named caches, a third for the tokens of "
        "answers, a third for the stored responses of each tenant",
        minimum=2**20,
    )
    off: tuple[str, ...] = setting(
        (),
        help="features to do without: caches (named ones), responses (stored ones), history (continuing "
        "conversations from their tokens), shared_history (at any router), explain, tool_gaps (keeping "
        "prompts while tools run), programs (what agents send counts as their turns), program_admission "
        "(programs that do not fit into the fleet's KV all at once wait between turns)",
    )
    program_headers: tuple[str, ...] = setting(
        (),
        help="headers that name a client's session, before those that coding agents send; its requests are "
        "then turns of one program",
    )
    max_body_bytes: int = setting(
        8 * 2**20, help="maximum size of a request body; larger ones get 413", minimum=1
    )
    upload_seconds: float = setting(
        60.0, help="maximum time for a request to arrive; slower bodies get 408", above=0
    )
    max_in_flight: int = setting(4096, help="maximum number of requests in flight; more get 429", minimum=1)
    wait_seconds: float = setting(
        15.0,
        help="maximum wait while a model has no ready replica but some are starting; then requests get 503",
        minimum=0,
    )
    wait_for_replica_seconds: float = setting(
        0.0,
        help="maximum wait for the first replica of a model that has none, as where an autoscaler starts one "
        "for requests that wait; then they get 503, and with 0 at once unless one is starting",
        minimum=0,
    )
    queue_seconds: float = setting(
        1.0,
        help="maximum time for which a request without a deadline is held in an overload, unless its own "
        "prompt takes longer; then, or if more is expected, it gets 429",
        minimum=0,
    )
    max_connections: int = setting(8192, help="maximum number of client connections; more get 503", minimum=1)
    address_share: float = setting(
        0.5,
        help="share of the connections, of the requests in flight, and of the memory for bodies "
        "that one client address may use; 1 if all clients come from one address, as behind a "
        "load balancer",
    )
    max_choices: int = setting(16, help="maximum number of choices (n) per prompt", minimum=1)
    response_seconds: float = setting(86_400.0, help="time for which a response is stored", above=0)
    usage_hours: int = setting(
        744,
        help="hours for which it is kept in Redis what each tenant and key has used; 0 counts nothing",
        minimum=0,
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
    pass_fields: tuple[str, ...] = setting(
        (),
        help="fields that are sent to a server of the engine openai, or behind a gateway, though they are "
        "not read here, such as verbosity or keep_alive, and as tools.TYPE the tools that run at the server; "
        "every client may then use them",
    )
    client_priority: bool = setting(
        False,
        help="whether a request's priority counts (lower goes first); by default it is ignored, "
        "because any client could go before all others",
    )
    history_seconds: float = setting(
        3600.0,
        help="time after a conversation's last turn for which its answers' tokens are in Redis",
        above=0,
    )
    drain_seconds: int = setting(30, help="maximum wait for running requests on SIGTERM", minimum=0)
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

    picker_port: int | None = setting(
        None,
        help="gRPC port on which the router is the endpoint picker of an InferencePool (Envoy's external "
        "processing); 0 takes a free one; none means that it is not",
    )
    picker_host: str = setting("127.0.0.1", help="address to listen on for the picker port")
    picker_tls_certificate: str | None = setting(
        None, help="PEM file with the picker port's certificate; with it, that port speaks TLS"
    )
    picker_tls_key: str | None = setting(
        None, help="PEM file with the key of that certificate, not encrypted"
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

    # Shares of the two budgets.
    image_memory_bytes: int = old_setting(_memory(32), instead=MEMORY)
    body_memory_bytes: int = old_setting(_memory(8), instead=MEMORY)
    max_waiting_bytes: int = old_setting(_memory(8), instead=MEMORY, minimum=0)
    tokenizer_cache_bytes: int = old_setting(_memory(2), instead=MEMORY, minimum=0)
    hash_cache_bytes: int = old_setting(_memory(1), instead=MEMORY, minimum=0)
    cache_memory_bytes: int = old_setting(_memory(1), instead=MEMORY, minimum=0)
    response_memory_bytes: int = old_setting(_memory(2), instead=MEMORY, minimum=0)
    history_bytes: int = old_setting(
        _unless_off("history", _memory(2)), instead="set memory_bytes, or off=history for none", minimum=0
    )
    explain_bytes: int = old_setting(
        _unless_off("explain", _memory(2)), instead="set memory_bytes, or off=explain for none", minimum=0
    )
    all_caches_bytes: int = old_setting(_redis(3), instead=REDIS, minimum=0)
    all_responses_bytes: int = old_setting(_redis(3), instead=REDIS, minimum=0)
    all_history_bytes: int = old_setting(
        _unless_off("shared_history", _redis(3)),
        instead="set redis_bytes, or off=shared_history for none",
        minimum=0,
    )
    max_cache_bytes: int = old_setting(
        _redis(192), instead="set redis_bytes; a named cache has a 192nd", minimum=1
    )

    # Bounds that follow from max_in_flight: a request has some sequences and tokens, and may wait.
    max_sequences: int = old_setting(
        lambda config: max(8192, 2 * config.max_in_flight), instead=IN_FLIGHT, minimum=1
    )
    max_tokens_in_flight: int = old_setting(
        lambda config: max(2**24, 4096 * config.max_in_flight), instead=IN_FLIGHT, minimum=1
    )
    max_queued: int = old_setting(
        lambda config: max(4096, config.max_in_flight), instead=IN_FLIGHT, minimum=0
    )
    max_waiting: int = old_setting(
        lambda config: max(2048, config.max_in_flight // 2), instead=IN_FLIGHT, minimum=0
    )

    # What no operator had a reason to turn.
    max_prompts: int = old_setting(128, instead="then fixed at 128", minimum=1)
    max_caches: int = old_setting(
        _unless_off("caches", lambda config: 1024),
        instead="set redis_bytes, or off=caches for none",
        minimum=0,
    )
    max_responses: int = old_setting(
        _unless_off("responses", lambda config: 4096),
        instead="set redis_bytes, or off=responses for none",
        minimum=0,
    )
    tool_gap_seconds: int = old_setting(
        _unless_off("tool_gaps", lambda config: 300),
        instead="then fixed at 300; set off=tool_gaps for none",
        minimum=0,
    )
    delay_price: float = old_setting(0.05, instead="then fixed at 0.05", minimum=0)
    queue_target_seconds: float = old_setting(0.25, instead="then fixed at 0.25", minimum=0)
    overdue_seconds: float = old_setting(
        60.0, instead="then fixed at 60, or twenty of a replica's steps", above=0
    )
    poll_seconds: float = old_setting(0.5, instead="then fixed at 0.5", above=0)
    upload_bytes_per_second: int = old_setting(1024, instead="then fixed at 1024", minimum=1)
    head_seconds: float = old_setting(10.0, instead="then fixed at 10", above=0)
    write_seconds: float = old_setting(30.0, instead="then fixed at 30", above=0)
    stream_comment_seconds: float = old_setting(
        15.0, instead="then fixed at 15, less than proxies wait for a silent stream", above=0
    )
    history_wait_seconds: float = old_setting(0.02, instead="then fixed at 0.02", above=0)
    record_bodies_bytes: int = old_setting(2**30, instead="then fixed at 1 GiB")

    @property
    def has_admin_listener(self) -> bool:
        """Whether there is an admin listener. Several processes always have one: on the shared port any of
        them might answer."""
        return self.admin_port is not None or self.admin_socket is not None or self.processes > 1

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return self.keys_file is not None or self.keys_in_redis

    def __post_init__(self) -> None:
        fill_old_settings(self)
        self._check_keys()
        for name in self.off:
            if name not in CAN_BE_OFF:
                raise SettingsError(f"setting off takes any of {', '.join(CAN_BE_OFF)}, not {name!r}")
        if not 0 <= self.port < 2**16:
            raise SettingsError(f"setting port must be between 0 and 65535, not {self.port}")
        if self.admin_port is not None and not 0 <= self.admin_port < 2**16:
            raise SettingsError(f"setting admin_port must be between 0 and 65535, not {self.admin_port}")
        if self.picker_port is not None and not 0 <= self.picker_port < 2**16:
            raise SettingsError(f"setting picker_port must be between 0 and 65535, not {self.picker_port}")
        if (self.picker_tls_certificate is None) != (self.picker_tls_key is None):
            raise SettingsError("settings picker_tls_certificate and picker_tls_key go together")
        if self.admin_port is not None and self.admin_socket is not None:
            raise SettingsError("settings admin_port and admin_socket cannot be used together")
        check_bounds(self)
        if not 0 < self.address_share <= 1:
            raise SettingsError(
                f"setting address_share must be above 0 and at most 1, not {self.address_share}"
            )
        if self.body_memory_bytes * self.address_share < self.max_body_bytes:
            raise SettingsError(
                f"setting memory_bytes, an eighth of which is for bodies ({self.body_memory_bytes}), times "
                "address_share, must allow max_body_bytes"
            )
        if self.image_memory_bytes * self.address_share < self.max_body_bytes:
            raise SettingsError(
                f"setting memory_bytes, half of which is for images ({self.image_memory_bytes}), times "
                "address_share, must allow max_body_bytes"
            )
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
        if self.has_keys or self.open:
            return
        for host in (self.host, *(() if self.picker_port is None else (self.picker_host,))):
            if not means_loopback(host):
                raise SettingsError(
                    f"without API keys the router does not listen on {host}, where everyone who reaches it "
                    "would be one tenant: set keys_file (`kvasir keys create` makes keys), or open to have "
                    "it so"
                )
