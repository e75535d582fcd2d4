"""ServerFacts: what a server says of itself, from its answers.

Pure: parses texts that `server.py` has fetched. What a server does not say is an error here, since nothing is
guessed.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from replicas.errors import StartupError
from replicas.protocol.status import Adapter

_GAUGES = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "share_used",
    "process_start_time_seconds": "started_at",
}
_CONFIGURATION = "vllm:cache_config_info"


class ServerModel(NamedTuple):
    """A model of `/v1/models`. `root` is where the server found it: a folder or a name on a hub."""

    served_name: str
    root: str
    context_length: int
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True, slots=True)
class EventSource:
    """The source of one rank's events. `binds` is false if the server connects to us instead."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    binds: bool


class ServerLoad(NamedTuple):
    """One look at `/metrics`: gauges of one rank. `started_at` changes when the server does."""

    started_at: float
    num_running: int = 0
    num_waiting: int = 0
    share_used: float = 0.0


class CacheSizes(NamedTuple):
    block_size: int
    num_blocks: int
    """Blocks that hold KV: vLLM's null block is not counted."""


def read_models(text: bytes, served_name: str | None) -> ServerModel:
    """Parse `/v1/models`; `served_name` None takes the first model. Raises StartupError."""
    try:
        entries = json.loads(text)["data"]
        models = {entry["id"]: entry for entry in entries if not entry.get("parent")}
        name = next(iter(models)) if served_name is None else served_name
        if name not in models:
            raise StartupError(f"the server has no model {name}; it has {', '.join(models)}")
        root = str(models[name].get("root") or name)
        adapters = tuple(
            Adapter(entry["id"], _digest(f"{root}\0{entry['id']}\0{entry.get('root')}"))
            for entry in entries
            if entry.get("parent") == name
        )
        return ServerModel(name, root, int(models[name]["max_model_len"]), adapters)
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise StartupError(f"the server's list of models cannot be read: {error!r}") from error


def read_event_source(text: bytes, rank: int, url: str) -> EventSource | None:
    """Parse `/kv_event_sources`. None if the server publishes no events."""
    try:
        source = json.loads(text).get(str(rank))
        if not source or not source.get("enable_kv_cache_events"):
            return None
        host = urlsplit(url).hostname or "127.0.0.1"
        endpoint, binds = _reachable(str(source["endpoint"]), host)
        replay = source.get("replay_endpoint")
        return EventSource(
            endpoint, None if not replay else _reachable(str(replay), host)[0], str(source["topic"]), binds
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"the server's event sources cannot be read: {error!r}") from error


def _reachable(endpoint: str, host: str) -> tuple[str, bool]:
    """Replace a wildcard by the server's host; whether the server binds: vLLM connects to any other host."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint, True
    its_host, _, port = rest.rpartition(":")
    if its_host.strip("[]") in ("*", "::", "0.0.0.0", ""):
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}", True
    return endpoint, False


def read_load(text: str, rank: int) -> ServerLoad:
    """Parse the gauges of `/metrics`. Raises ValueError if the server's start is not among them."""
    found: dict[str, float] = {}
    for name, labels, value in _samples(text, _GAUGES):
        if labels.get("engine", str(rank)) == str(rank):
            found[_GAUGES[name]] = value
    if "started_at" not in found:
        raise ValueError("it does not say when it was started")
    return ServerLoad(
        found["started_at"],
        int(found.get("num_running", 0)),
        int(found.get("num_waiting", 0)),
        min(1.0, max(0.0, found.get("share_used", 0.0))),
    )


def read_cache_sizes(text: str, rank: int) -> CacheSizes:
    """Parse the cache's configuration in `/metrics`. Raises StartupError."""
    for _, labels, _ in _samples(text, (_CONFIGURATION,)):
        if labels.get("engine", str(rank)) != str(rank):
            continue
        try:
            sizes = CacheSizes(int(labels["block_size"]), int(labels["num_gpu_blocks"]) - 1)
        except (LookupError, ValueError) as error:
            raise StartupError(f"the server's cache sizes cannot be read: {error!r}") from error
        if labels.get("enable_prefix_caching") == "False":
            raise StartupError("the server caches no prefixes: start it without --no-enable-prefix-caching")
        if sizes.block_size < 1 or sizes.num_blocks < 1:
            raise StartupError(f"the server says that its cache has {sizes}")
        return sizes
    raise StartupError(f"the server's metrics have no {_CONFIGURATION} for rank {rank}: is it vLLM?")


def _samples(
    text: str, names: Mapping[str, str] | tuple[str, ...]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Parse only the lines of these metrics: all of them together take some ten times as long."""
    lines = [line for line in text.split("\n") if line.startswith(tuple(names))]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            if sample.name in names:
                yield sample.name, sample.labels, sample.value


def declared_fingerprint(root: str, files: Mapping[str, bytes]) -> str:
    """Identify a model by where the server found it and by our text files: its weights cannot be read.

    Never equals the fingerprint of weights.
    """
    digest = hashlib.sha256(f"declared\0{root}".encode())
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def tokens_of(answer: bytes) -> list[int]:
    """Parse an answer of `/tokenize`. Raises StartupError."""
    try:
        tokens: Any = json.loads(answer)["tokens"]
        return [int(token) for token in tokens]
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(f"the server's tokens cannot be read: {error!r}") from error
