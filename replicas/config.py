"""ReplicaConfig: every setting of a replica process, and the only place with its defaults.

The environment and the file are read by `replicas/process/settings.py`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from replicas.process.settings import (
    SettingsError,
    check_bounds,
    check_log_settings,
    check_secret_settings,
    check_trace_settings,
    secret_setting,
    setting,
)
from replicas.protocol.bounds import MAX_CARD_NAMES, MAX_NAME_CHARACTERS, checked_address, is_name
from replicas.protocol.passed_routes import ROUTES
from replicas.protocol.sampling_defaults import NAMES, checked_default
from replicas.protocol.status import Role

ENVIRONMENT_PREFIX = "KVASIR_REPLICA_"

ENGINES = ("torch", "vllm", "simulated", "remote", "openai")
SERVERS = ("remote", "openai")
"""Engines that are a server which runs already."""
_PORTS = {"http": 80, "https": 443}

METADATA_HOSTS = frozenset(
    {"169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254", "metadata.google.internal"}
)
"""Hosts that give a cloud machine its credentials."""
ATTENTIONS = ("auto", "gather", "kernel")

DEFAULT_MAX_RUNNING = 256
DEFAULT_MAX_BATCHED_TOKENS = 2048
DEFAULT_SLO_TPOT = 0.05
DEFAULT_BLOCK_SIZE = 16
DEFAULT_CHUNK_TOKENS = 128
DEFAULT_VLLM_BLOCK_SIZE = 32
"""The smallest that vLLM takes on every platform."""


@dataclass(frozen=True)
class ReplicaConfig:
    replica_id: str = setting(
        "replica-0", help="name of this replica, stable across restarts, unique in the fleet"
    )
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0", help="Redis that holds the registry and the block index"
    )
    secret: str | None = secret_setting("cluster secret as hex digits (16 to 64 bytes), as routers have it")
    secret_file: str | None = setting(
        None,
        help="file with the cluster secret; of several lines the first is in force and the others "
        "are accepted, too; without secret and file, anyone who reaches the port may call",
    )
    engine: str = setting(
        "torch",
        help="torch, vllm, simulated, or a server that runs already: remote takes tokens, openai takes the "
        "bodies of clients",
    )
    model: str | None = setting(
        None, help="checkpoint directory; none means the toy model that ships with Kvasir"
    )
    model_name: str | None = setting(None, help="name that clients ask for; none means the directory's name")
    model_aliases: tuple[str, ...] = setting(
        (),
        help="other names that clients may ask for the model by: A,B,C; answers carry the model's own name",
    )
    role: str = setting(
        "both",
        help="what this replica should do where one computes a prompt and another decodes it: prefill, "
        "decode or both; a preference, since each does all where no other can",
    )
    host: str = setting("127.0.0.1", help="address to listen on for gRPC; routers must reach it")
    port: int = setting(0, help="gRPC port; 0 takes a free one")
    tls_certificate: str | None = setting(
        None, help="PEM file with the replica's certificate; with it, the gRPC port speaks TLS"
    )
    tls_key: str | None = setting(None, help="PEM file with the key of that certificate, not encrypted")
    tls_client_ca: str | None = setting(
        None, help="PEM file with a private CA; only routers that have a certificate of this CA are served"
    )
    tls_peer_name: str = setting(
        "kvasir-replica", help="DNS name in the certificates of replicas from which this one pulls KV"
    )
    health_socket: str | None = setting(
        None, help="Unix socket that serves only health checks, without TLS, for probes on the same machine"
    )

    device: str = setting("auto", help="cpu, cuda, cuda:N, or auto: CUDA where there is a GPU")
    dtype: str = setting(
        "auto",
        help="float32, bfloat16, float16, or auto: the checkpoint's own, float32 on a CPU with torch",
    )
    context_length: int | None = setting(
        None, help="maximum number of tokens of prompt and answer together; none means the model's own limit"
    )
    block_size: int | None = setting(
        None,
        help="tokens per KV block; none means 16, and 32 with vllm, which needs a multiple of 32 on a CPU",
        minimum=1,
    )
    num_blocks: int | None = setting(None, help="KV blocks; none means as many as kv_cache_bytes holds")
    kv_cache_bytes: int | None = setting(
        None,
        help="memory of the KV cache in bytes; none means 128 MiB on a CPU, 85 % of what is free "
        "on a GPU with torch, and vLLM's own choice with vllm",
    )
    max_batched_tokens: int | None = setting(
        None,
        help="maximum number of tokens computed in one step (longer prefills are split into "
        "chunks); none means 2048, or with simulated, what its hardware computes",
        minimum=1,
    )
    slo_tpot: float | None = setting(
        DEFAULT_SLO_TPOT,
        help="seconds between tokens that a request should keep while others' prompts are computed: a step "
        "with both gets no more prompt tokens than leave it that time, at least 128, and more while many "
        "wait; none means no such bound; torch, vllm and simulated only",
        above=0,
    )
    max_running: int = setting(DEFAULT_MAX_RUNNING, help="maximum number of requests in one batch", minimum=1)
    max_waiting: int = setting(
        1024,
        help="maximum number of waiting sequences (requests times n); more are refused as overloaded",
        minimum=1,
    )
    max_open_tokens: int | None = setting(
        None,
        help="maximum number of tokens of requests that run or wait (prompts once, up to 1,024 of "
        "each answer); more are refused as overloaded; none means 16 times what the KV cache "
        "holds",
        minimum=1,
    )
    host_kv_bytes: int | None = setting(
        None,
        help="host memory for KV below the device, in bytes, taken beside everything else; none means that "
        "what the device forgets is computed anew; torch and vllm only",
        minimum=1,
    )
    disk_kv_bytes: int | None = setting(
        None,
        help="disk for KV below the host memory, in bytes; it outlives the replica; needs kv_folder and "
        "host_kv_bytes",
        minimum=1,
    )
    kv_folder: str | None = setting(
        None,
        help="folder of this replica alone for its KV on disk, from which its prompts could be told",
    )
    disk_reserve_bytes: int = setting(
        2**30, help="free space of the disk's file system that KV leaves to others, in bytes", minimum=0
    )
    disk_write_bytes_per_second: float | None = setting(
        None, help="maximum rate at which KV is written to the disk, on average; none means no limit", above=0
    )
    disk_write_bytes_per_day: float | None = setting(
        None,
        help="maximum number of bytes of KV that are written to the disk in a day, on average, since "
        "SSDs wear out; none means no limit",
        above=0,
    )
    spill_seconds: float = setting(
        10.0, help="maximum time at the end for writing to the disk what only host memory has", minimum=0
    )
    pull_bytes_per_second: float | None = setting(
        None,
        help="what the network between replicas carries, in bytes per second: KV that another replica has in "
        "host memory is pulled from there where that should be sooner than computing it; none means that "
        "this replica neither pulls nor lets others pull; needs host_kv_bytes",
        above=0,
    )
    hand_over_bytes: int | None = setting(
        None,
        help="maximum number of bytes of leased KV that other replicas are asked to keep when this one "
        "drains; none means all that is leased, 0 hands nothing over; needs pull_bytes_per_second",
        minimum=0,
    )
    image_bytes: int = setting(
        2**30,
        help="memory for images, as prepared for the model, that prompts refer to or may refer to again, in "
        "bytes; 0 serves every model for text only",
        minimum=0,
    )
    chunk_tokens: int | None = setting(
        None,
        help="tokens of KV that move between the tiers together: a multiple of block_size of which "
        "index_stride is a multiple; none means 128, or a block where that is more",
        minimum=1,
    )
    lease_share: float = setting(
        0.5,
        help="share of each tier below the device that requests may have kept for a time of theirs "
        "(prompt_cache_retention, prompt_cache_options.ttl); 0 grants none",
    )
    grammar_seconds: float = setting(
        10.0,
        help="maximum time that a request waits until the schema or grammar its answer must follow is "
        "worked out; then it is refused",
        above=0,
    )
    attention: str = setting(
        "auto",
        help="how cached keys are read: gather copies them, kernel reads them where they lie and is compiled "
        "at the start; auto means kernel on CUDA if it works there, else gather; torch only",
    )
    num_threads: int | None = setting(None, help="CPU threads of torch; none leaves torch's choice")
    sampling_defaults: str = setting(
        "model",
        help="how requests are sampled that do not say: model, as its generation_config.json says, or as the "
        "server would with remote; neutral, at temperature 1 from all tokens",
    )
    sampling_override: Mapping[str, Any] | None = setting(
        None,
        help="single values in place of those defaults, NAME=VALUE,NAME=VALUE or a mapping: temperature, "
        "top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, max_new_tokens; "
        "null takes one away",
    )
    adapters: Mapping[str, str] | None = setting(
        None, help="LoRA adapters, NAME=DIRECTORY,NAME=DIRECTORY or a mapping; vllm only"
    )
    engine_process: bool | None = setting(
        None,
        help="run the engine in its own process; none means only with vllm",
    )
    engine_args: Mapping[str, Any] | None = setting(
        None, help="vLLM's own engine arguments, NAME=VALUE,NAME=VALUE or a mapping; vllm only"
    )
    trust_code: bool = setting(
        False,
        help="let engine_args and adapters run code that comes with a model or from elsewhere: "
        "trust_remote_code, classes named by their module, pickled weights; vllm only",
    )
    build_seconds: float = setting(
        3600.0,
        help="maximum time until the engine is ready, with its model loaded and its hashes "
        "verified; then the replica ends and is started again",
        above=0,
    )
    standstill_seconds: float = setting(
        120.0,
        help="a replica whose event loop has not run for this long ends at once and logs where its "
        "threads stood; an engine that holds Python's lock causes this",
        above=0,
    )

    engine_url: str | None = setting(
        None, help="the server that computes, such as http://127.0.0.1:8000; remote and openai only"
    )
    engine_key_file: str | None = setting(
        None, help="file with the API key that the server asks for; remote and openai only"
    )
    engine_model: str | None = setting(
        None, help="name under which the server has the model; none means its first; remote and openai only"
    )
    engine_rank: int | None = setting(
        None,
        help="the server's data-parallel rank that this replica is; none means that it has one; remote only",
        minimum=0,
    )

    engine_endpoint: str | None = setting(
        None,
        help="host:port by which a gateway in front of the server reaches it, where engine_url names a "
        "loopback address or has a path; none takes the address of engine_url; remote, or openai with routes",
    )
    routes: tuple[str, ...] = setting(
        (),
        help="routes that are passed on to the server as they are, besides those that it generates at, such "
        "as /v1/embeddings,/rerank; openai only",
    )

    engine_events_elsewhere: bool = setting(
        False,
        help="take cache events and replays from wherever the server says: from another host, from a Unix "
        "socket of a server elsewhere, or at an address of ours where anybody may send them; remote only",
    )
    kv_connector: str | None = setting(
        None,
        help="nixl: the server was started with vLLM's NIXL connector, so a prompt may be computed at one "
        "such server and decoded at another; none means never; remote only",
    )
    kv_lease_seconds: float = setting(
        30.0,
        help="how long the server keeps the KV of such a prompt for the other, its kv_lease_duration; what "
        "is older than half of that is computed anew; a value above the server's own makes wrong answers",
        above=0,
    )

    simulated_hardware: str = setting(
        "h100-8b", help="cost model of the simulated engine: h100-8b, h100x4-70b or instant"
    )
    simulated_speed: float = setting(
        1.0, help="the simulated engine runs this many times faster than its hardware"
    )
    simulated_script: str | None = setting(
        None,
        help='JSON file of what the simulated engine answers, [{"when": text, "say": text}, …]: of the rules '
        "whose `when` is in the prompt's text, the one whose stands last; none, or no such rule, means "
        "arbitrary words",
    )
    simulated_groups: str | None = setting(
        None,
        help="the simulated engine's layers keep different KV: gpt-oss, gemma-3, llama-4, qwen3-next, "
        "deepseek-v4, or groups such as window:16:128 full:16 (kind, block size, window), which replace "
        "block_size and share num_blocks",
    )
    simulated_retention: int = setting(
        0,
        help="with simulated_groups, a prompt can also be resumed at every multiple of this: vLLM's "
        "prefix_cache_retention_interval; 0 means only at its end and where a beginning is shared",
        minimum=0,
    )

    index_stride: int = setting(
        128, help="the index keeps one block hash per this many tokens of a prompt", minimum=1
    )
    events_stream_length: int = setting(
        100_000, help="number of entries that the stream of index changes keeps"
    )
    events_stream_bytes: int = setting(
        64 * 2**20,
        help="memory in Redis that the stream of index changes may take, for each model",
        minimum=1,
    )
    lease_seconds: float = setting(
        3.0, help="a replica that has sent no heartbeat for this long counts as dead"
    )
    heartbeat_seconds: float = setting(1.0, help="time between heartbeats")
    drain_seconds: float = setting(30.0, help="maximum wait for running requests on SIGTERM")
    engine_hang_seconds: float = setting(
        30.0,
        help="an engine that has work but finishes no step for this long is considered hung, and "
        "the replica ends; the limit is at least five times the longest step that can be "
        "expected",
        above=0,
    )
    metrics_port: int | None = setting(
        None,
        help="port of the Prometheus endpoint /metrics on host; 0 takes a free one; none means no endpoint",
    )
    log_format: str = setting("text", help="text, or json: one object per line")
    log_level: str = setting("info", help="debug, info, warning or error")
    otlp_endpoint: str | None = setting(
        None, help="OpenTelemetry collector for traces, such as http://127.0.0.1:4318; none means no traces"
    )
    trace_sample_ratio: float = setting(
        1.0, help="share of requests that are traced, unless the caller's traceparent decides"
    )

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise SettingsError(f"setting engine is {', '.join(ENGINES)}, not {self.engine}")
        if self.role not in tuple(Role):
            raise SettingsError(f"setting role is {', '.join(Role)}, not {self.role}")
        if self.attention not in ATTENTIONS:
            raise SettingsError(f"setting attention is auto, gather or kernel, not {self.attention}")
        if self.attention != "auto" and self.engine != "torch":
            raise SettingsError(f"setting attention is for the engine torch, not for {self.engine}")
        if self.simulated_script and self.engine != "simulated":
            raise SettingsError(f"setting simulated_script is for the engine simulated, not {self.engine}")
        if self.simulated_groups and self.engine != "simulated":
            raise SettingsError(f"setting simulated_groups is for the engine simulated, not {self.engine}")
        for name in ("engine_args", "adapters", "trust_code"):
            if getattr(self, name) and self.engine != "vllm":
                raise SettingsError(f"setting {name} is for the engine vllm, not for {self.engine}")
        if self.kv_connector not in (None, "nixl"):
            raise SettingsError(f"setting kv_connector is nixl or none, not {self.kv_connector}")
        of_remote = ("engine_rank", "engine_events_elsewhere", "kv_connector")
        for name in ("engine_url", "engine_key_file", "engine_model", "engine_endpoint", *of_remote):
            engines = ("remote",) if name in of_remote else SERVERS
            value = getattr(self, name)
            if value is not None and value is not False and self.engine not in engines:
                raise SettingsError(f"setting {name} is for the engine remote, not for {self.engine}")
        if self.engine in SERVERS:
            self._check_server()
        self._check_routes()
        if len(self.model_aliases) > MAX_CARD_NAMES or not all(map(is_name, self.model_aliases)):
            raise SettingsError(
                f"setting model_aliases takes at most {MAX_CARD_NAMES} names of 1 to {MAX_NAME_CHARACTERS}"
                " printable characters"
            )
        self._check_sampling()
        check_bounds(self)
        self._check_tiers()
        if not self.heartbeat_seconds * 2 <= self.lease_seconds:
            raise SettingsError("setting lease_seconds must be at least twice heartbeat_seconds")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SettingsError("settings tls_certificate and tls_key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise SettingsError("setting tls_client_ca needs tls_certificate and tls_key")
        check_secret_settings(self.secret, self.secret_file)
        check_log_settings(self.log_format, self.log_level)
        check_trace_settings(self.otlp_endpoint, self.trace_sample_ratio)

    def _check_server(self) -> None:
        if self.engine_url is None:
            raise SettingsError("setting engine_url is needed, such as http://127.0.0.1:8000")
        server_address(self.engine_url)
        if self.engine_endpoint is not None:
            try:
                checked_address(self.engine_endpoint)
            except ValueError as error:
                raise SettingsError(f"setting engine_endpoint: {error}") from error
        foreign = ["host_kv_bytes", "kv_cache_bytes", "engine_process", "slo_tpot"]
        for name in [*foreign, "num_blocks"] if self.engine == "remote" else foreign:
            if getattr(self, name) and getattr(self, name) != getattr(ReplicaConfig, name):
                raise SettingsError(f"setting {name} is not for the engine {self.engine}: its server decides")

    def _check_routes(self) -> None:
        if self.engine == "openai" and self.engine_endpoint and not self.routes:
            raise SettingsError("setting engine_endpoint is for the engine openai only with routes")
        if self.routes and self.engine != "openai":
            raise SettingsError(f"setting routes is for the engine openai, not for {self.engine}")
        for route in self.routes:
            if route not in ROUTES:
                raise SettingsError(f"setting routes has {route}; it takes {', '.join(ROUTES)}")

    def _check_sampling(self) -> None:
        if self.sampling_defaults not in ("model", "neutral"):
            raise SettingsError(
                f"setting sampling_defaults is model or neutral, not {self.sampling_defaults}"
            )
        if self.engine == "openai" and (self.sampling_override or self.sampling_defaults != "model"):
            raise SettingsError("sampling defaults are not for the engine openai: its server decides")
        for name, value in (self.sampling_override or {}).items():
            if name not in NAMES:
                raise SettingsError(f"setting sampling_override has {name}; it takes {', '.join(NAMES)}")
            try:
                if value is not None:
                    checked_default(name, value)
            except ValueError as error:
                raise SettingsError(f"setting sampling_override: {error}") from error

    def _check_tiers(self) -> None:
        if self.disk_kv_bytes is not None and (self.kv_folder is None or self.host_kv_bytes is None):
            raise SettingsError("setting disk_kv_bytes needs kv_folder and host_kv_bytes")
        if self.pull_bytes_per_second is not None and self.host_kv_bytes is None:
            raise SettingsError("setting pull_bytes_per_second needs host_kv_bytes")
        if self.pull_bytes_per_second is not None and self.tls_certificate and not self.tls_client_ca:
            raise SettingsError("setting pull_bytes_per_second needs tls_client_ca where replicas speak TLS")
        if not 0 <= self.lease_share <= 1:
            raise SettingsError("setting lease_share must lie between 0 and 1")
        if self.host_kv_bytes is None:
            return
        if self.engine == "simulated":
            raise SettingsError("setting host_kv_bytes is for the engines torch and vllm, not for simulated")
        chunk, block, stride = self.tokens_per_chunk, self.tokens_per_block, self.index_stride
        if chunk % block:
            raise SettingsError(f"setting chunk_tokens is a multiple of block_size, {block}, not {chunk}")
        if max(stride, block) % chunk:
            raise SettingsError(
                f"setting index_stride is a multiple of chunk_tokens, {chunk}, not {stride}: else routers "
                "would not find the chunks"
            )

    @property
    def tokens_per_chunk(self) -> int:
        """The setting, or the default for blocks that are no larger."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return max(DEFAULT_CHUNK_TOKENS, self.tokens_per_block)

    @property
    def whole_because(self) -> str | None:
        """Why no prompt is split between this replica and another, as a clause. None if it can be."""
        if self.engine in ("simulated", "openai"):
            return f"the engine {self.engine} has no KV that others can pull"
        if self.engine == "remote":
            return None if self.kv_connector else "its server is not said to have a connector (kv_connector)"
        if self.host_kv_bytes is None:
            return "it has no host memory for KV (host_kv_bytes)"
        if self.pull_bytes_per_second is None:
            return "it does not pull (pull_bytes_per_second)"
        return None

    @property
    def seconds_to_spill(self) -> float:
        """Seconds that stopping may take longer, to write unwritten KV to disk."""
        return 0.0 if self.disk_kv_bytes is None else self.spill_seconds

    @property
    def has_engine_process(self) -> bool:
        """The setting, or the engine's default."""
        return self.engine == "vllm" if self.engine_process is None else self.engine_process

    @property
    def tokens_per_step(self) -> int:
        """The most that was set, or the default of engines that compute."""
        return self.max_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS

    @property
    def tokens_per_block(self) -> int:
        """The block size that was set, or the engine's default."""
        if self.block_size is not None:
            return self.block_size
        return DEFAULT_VLLM_BLOCK_SIZE if self.engine == "vllm" else DEFAULT_BLOCK_SIZE


def _dotted(host: str) -> str | None:
    """Write an IP address in its usual way, also one such as 0xa9fea9fe, 169.254.43518 or
    ::ffff:169.254.169.254; None for a name."""
    with suppress(ValueError):
        if ":" in host:
            address = IPv6Address(host)
            return str(address.ipv4_mapped or address)
        bases = {"0x": 16, "0": 8}
        *first, last = (
            int(each, bases.get(each[:2].lower(), bases.get(each[:1], 10))) for each in host.split(".")
        )
        return str(IPv4Address(last + sum(each << 8 * (3 - place) for place, each in enumerate(first))))
    return None


def server_address(url: str) -> str:
    """Return the one spelling of a server's address. Raises SettingsError."""
    if "@" in url:
        raise SettingsError("a server's address has no password in it: setting engine_key_file has its key")
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname or "", parts.port
        is_address = scheme in _PORTS and host and port != 0 and not parts.query + parts.fragment
        name = f"[{ip_address(host)}]" if ":" in host else host
    except ValueError:
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise SettingsError(f"a server's address is one such as http://127.0.0.1:8000, not {url!r}")
    if host.lower() in METADATA_HOSTS or _dotted(host) in METADATA_HOSTS:
        raise SettingsError(f"{host} is a cloud's metadata service, and no server of models")
    shown = "" if port in (None, _PORTS[scheme]) else f":{port}"
    return f"{scheme}://{name}{shown}{parts.path.rstrip('/')}"
