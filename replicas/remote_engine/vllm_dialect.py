"""VllmDialect: vLLM's `/v1/completions`, its events, and what `/metrics` and `/kv_event_sources` say.

Pure. Owns the body and the shape of a chunk.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from replicas.engine import EngineRequest, RequestRefused
from replicas.errors import StartupError
from replicas.protocol.bounds import Uint32
from replicas.protocol.frames import FinishReason, RefusalCode, TokenLogprobs
from replicas.remote_engine.dialect import Chunk, Delta, Reader, said_parameters
from replicas.remote_engine.facts import (
    CacheSizes,
    EventSource,
    ServerLoad,
    ServerModel,
    bounded,
    reachable,
)
from replicas.remote_engine.refusals import refusal_of
from replicas.remote_engine.residency import ServerEvent
from replicas.scheduling.resuming import end_token_ids, resumed_logit_bias, resumed_seed

_MOST_SEED = 2**63
"""Servers take seeds of 63 bits."""

_MOST_BYTES = 2**20
"""Longest event of a stream, beside its prompt, which the first one repeats."""
_TOKEN_BYTES = 12
"""Length of one token id of the prompt, as text."""

_GAUGES = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "share_used",
    "process_start_time_seconds": "started_at",
}
_CONFIGURATION = "vllm:cache_config_info"

_TOKEN_ID = "token_id:"

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


class Logprobs(msgspec.Struct):
    """Parallel lists, an entry a token; tokens are `token_id:ID`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    token_ids: list[Uint32] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Event(msgspec.Struct):
    """One event of the stream. The last has the usage and no choice."""

    choices: list[Choice] = []
    usage: object = None
    error: object = None
    kind: object = msgspec.field(name="object", default=None)


_EVENTS = msgspec.json.Decoder(Event)
_CACHE_EVENTS: msgspec.msgpack.Decoder[ServerEvent] = msgspec.msgpack.Decoder(ServerEvent)


@dataclass(frozen=True, slots=True)
class VllmDialect:
    model: ServerModel
    sizes: CacheSizes
    source: EventSource | None
    rank: int
    generate_path: ClassVar[str] = "/v1/completions"
    look_paths: ClassVar[Sequence[str]] = ("/metrics",)
    defaults_in_file: ClassVar[Sequence[str]] = ("max_new_tokens",)
    """Its `/v1/completions` answers 16 tokens where no number is said."""
    advice: ClassVar[str] = (
        "start vLLM with --kv-events-config"
        ' \'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
    )
    advice_on_cached: ClassVar[str] = "start vLLM with --enable-prompt-tokens-details"
    why_no_nixl: ClassVar[str] = ""

    def body(self, request: EngineRequest, name: str, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
        return body_of(request, name, self.model.served_name, eos_token_ids)

    def reader(self, request: EngineRequest) -> Reader:
        return partial(read_chunk, request.sampling.num_logprobs)

    def most_bytes(self, request: EngineRequest) -> int:
        return _MOST_BYTES + _TOKEN_BYTES * len(request.token_ids)

    def cache_event(self, raw: msgspec.Raw) -> ServerEvent:
        return _CACHE_EVENTS.decode(raw)

    def load(self, answers: Sequence[bytes]) -> ServerLoad:
        return read_load(answers[0].decode(), self.rank)


def read_vllm(
    metrics: bytes, sources: bytes | None, model: ServerModel, url: str, rank: int | None
) -> VllmDialect:
    """Read the answers of `/metrics` and, if there is one, of `/kv_event_sources`. Without a rank it is the
    first that has events. Raises StartupError."""
    if rank is None:
        rank = 0 if sources is None else _first_rank(sources)
    source = None if sources is None else read_event_source(sources, rank, url)
    return VllmDialect(model, read_cache_sizes(metrics.decode(), rank), source, rank)


def _first_rank(sources: bytes) -> int:
    try:
        return min((int(rank) for rank in json.loads(sources)), default=0)
    except (ValueError, TypeError) as error:
        raise StartupError(f"the server's event sources cannot be read: {error!r}") from error


def read_chunk(num_logprobs: int | None, event: bytes) -> Chunk:
    """Raises ValueError, IndexError or MsgspecError."""
    found = _EVENTS.decode(event)
    if found.error or found.kind == "error":
        return Chunk(refusal=refusal_of(event, 200))
    details = found.usage.get("prompt_tokens_details") if isinstance(found.usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Chunk([_delta(choice, num_logprobs) for choice in found.choices], cached)


def _delta(choice: Choice, num_logprobs: int | None) -> Delta:
    finish, logprobs, token_ids = choice.finish_reason, None, tuple(choice.token_ids or ())
    if choice.logprobs is not None and num_logprobs is not None:
        logprobs = logprobs_of(choice.logprobs, num_logprobs)
        if len(logprobs) != len(token_ids):
            raise ValueError(f"log-probabilities of {len(logprobs)} tokens, not of {len(token_ids)}")
    finished = None if finish is None else FINISH_REASONS.get(finish, FinishReason.ERROR)
    return Delta(token_ids, finished, logprobs)


def body_of(
    request: EngineRequest, name: str, served_name: str, eos_token_ids: tuple[int, ...]
) -> dict[str, Any]:
    """Return the body of a request; `name` comes back with the events of its blocks. Raises
    RequestRefused."""
    submit, sampling = request.submit, request.sampling
    if submit.published is not None:
        raise RequestRefused(RefusalCode.INVALID_REQUEST, "a server takes one namespace per prompt")
    if submit.media:
        raise RequestRefused(RefusalCode.INVALID_REQUEST, "images are not sent to a server")
    held = bool(sampling.grammar)
    body: dict[str, Any] = {
        "model": submit.adapter or served_name,
        "prompt": list(request.token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": submit.root.hex(),
        "session_id": name,
        "priority": submit.priority,
        "max_tokens": sampling.max_tokens - submit.num_output_tokens,
        "min_tokens": 0 if held else max(0, sampling.min_tokens - submit.num_output_tokens),
        **said_parameters(sampling),
        # As with vLLM in the process: the ends are stop tokens, so that all of them are known.
        "stop_token_ids": end_token_ids(request, eos_token_ids),
        "ignore_eos": True,
    }
    if sampling.is_seeded:  # others would be sampled one by one
        body["seed"] = resumed_seed(request) % _MOST_SEED
    if bias := resumed_logit_bias(request):
        body["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
    if sampling.num_logprobs is not None:
        body |= {"logprobs": sampling.num_logprobs, "return_tokens_as_token_ids": True}
    if held:
        body["structured_outputs"] = {"grammar": as_lark(sampling.grammar)}
    return body


def logprobs_of(found: Logprobs, num_logprobs: int) -> tuple[TokenLogprobs, ...]:
    """Raises ValueError or IndexError for lists that do not fit together."""
    entries = []
    for number, (token, logprob) in enumerate(zip(found.tokens, found.token_logprobs, strict=True)):
        tops: Mapping[str, float] = (found.top_logprobs[number] if found.top_logprobs else None) or {}
        ranked = sorted(tops.items(), key=lambda item: -item[1])[:num_logprobs]
        top = tuple((_token_id(name), value) for name, value in ranked)
        entries.append(TokenLogprobs(_token_id(token), 0.0 if logprob is None else logprob, top))
    return tuple(entries)


def _token_id(name: str) -> int:
    """Raises ValueError."""
    number = name.removeprefix(_TOKEN_ID)
    if number == name or not 0 <= int(number) < 2**32:
        raise ValueError(f"{name!r} is no token id")
    return int(number)


_REFERENCE = re.compile(r'"(?:\\.|[^"\\])*"|@([A-Za-z_][A-Za-z_0-9]*)')
"""A quoted text, or the name of another grammar."""


def as_lark(grammar: str) -> str:
    """Write a grammar of several parts, in llguidance's notation, as one Lark text, which servers take.

    Each named part becomes a rule. Raises RequestRefused for a part in another notation.
    """
    whole, *parts = json.loads(grammar)["grammars"]
    rules = {part["name"]: f"part_{number}" for number, part in enumerate(parts)}

    def named(found: re.Match[str]) -> str:
        return rules.get(found[1] or "", found[0])

    lines = [_REFERENCE.sub(named, whole["lark_grammar"])]
    for part in parts:
        if "json_schema" in part:
            lines.append(f"{rules[part['name']]}: %json {json.dumps(part['json_schema'])}")
        elif "lark_grammar" in part:
            inner = _REFERENCE.sub(named, part["lark_grammar"])
            lines.append(f"{rules[part['name']]}: %lark {{\n{inner}\n}}")
        else:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, "this grammar cannot be sent to a server")
    return "\n".join(lines) + "\n"


def read_event_source(text: bytes, rank: int, url: str) -> EventSource | None:
    """Parse `/kv_event_sources`. None if the server publishes no events."""
    try:
        source = json.loads(text).get(str(rank))
        if not source or not source.get("enable_kv_cache_events"):
            return None
        host = urlsplit(url).hostname or "127.0.0.1"
        endpoint, binds = reachable(str(source["endpoint"]), host)
        replay = source.get("replay_endpoint")
        return EventSource(
            endpoint, None if not replay else reachable(str(replay), host)[0], str(source["topic"]), binds
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"the server's event sources cannot be read: {error!r}") from error


def read_load(text: str, rank: int) -> ServerLoad:
    """Parse the gauges of `/metrics`. Raises ValueError if the server's start is not among them."""
    found: dict[str, float] = {}
    for name, labels, value in _samples(text, _GAUGES):
        if labels.get("engine", str(rank)) == str(rank):
            found[_GAUGES[name]] = value
    if "started_at" not in found:
        raise ValueError("it does not say when it was started")
    return ServerLoad(
        str(found["started_at"]),
        bounded(found.get("num_running", 0)),
        bounded(found.get("num_waiting", 0)),
        min(1.0, max(0.0, found.get("share_used", 0.0))),
    )


def read_cache_sizes(text: str, rank: int) -> CacheSizes:
    """Parse the cache's configuration in `/metrics`. Raises StartupError."""
    for _, labels, _ in _samples(text, (_CONFIGURATION,)):
        if labels.get("engine", str(rank)) != str(rank):
            continue
        try:
            size = int(labels["block_size"])
            sizes = CacheSizes(size, int(labels["num_gpu_blocks"]) - 1, size)  # without the null block
        except (LookupError, ValueError) as error:
            raise StartupError(f"the server's cache sizes cannot be read: {error!r}") from error
        if labels.get("enable_prefix_caching") == "False":
            raise StartupError("the server caches no prefixes: start it without --no-enable-prefix-caching")
        if sizes.block_size < 1 or sizes.num_blocks < 1:
            raise StartupError(f"the server says that its cache has {sizes}")
        return sizes.believed()
    raise StartupError(
        f"the server's metrics have no {_CONFIGURATION} for rank {rank}: is it vLLM? Servers of"
        " other kinds are joined with --engine openai"
    )


def _samples(
    text: str, names: Mapping[str, str] | tuple[str, ...]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Parse only the lines of these metrics: all of them together take some ten times as long."""
    lines = [line for line in text.split("\n") if line.startswith(tuple(names))]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            if sample.name in names:
                yield sample.name, sample.labels, sample.value
