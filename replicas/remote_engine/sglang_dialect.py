"""SglangDialect: SGLang's `/generate`, its events and its load, as its sources have them (0.5.23).

Pure. Owns the body, the shape of a chunk and of an event, and what `/server_info` says.

Answers repeat all of their tokens in each chunk, unless the server was started with
`--incremental-streaming-output`. Events are of pages, often of one token, which `residency.py` joins.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from replicas.engine import EngineRequest, RequestRefused
from replicas.errors import StartupError
from replicas.protocol.bounds import Uint32
from replicas.protocol.frames import FinishReason, RefusalCode, TokenLogprobs
from replicas.protocol.sampling_defaults import NAMES
from replicas.remote_engine.dialect import Chunk, Delta, Reader, said_parameters
from replicas.remote_engine.facts import (
    CacheSizes,
    EventSource,
    ServerLoad,
    ServerModel,
    bounded,
    reachable,
)
from replicas.remote_engine.pages import Hash
from replicas.remote_engine.refusals import refusal_of
from replicas.remote_engine.residency import Cleared, Removed, ServerEvent, Stored
from replicas.scheduling.resuming import end_token_ids, resumed_logit_bias, resumed_seed

LEAST_BLOCK_TOKENS = 16
"""Pages smaller than this are joined to blocks of at least as many tokens."""

_MOST_SEED = 2**63
_TOKEN_BYTES = 12
_LOGPROB_BYTES = 48
"""Length of one entry of a token's log-probabilities, as text."""
_MOST_OTHER_BYTES = 2**20

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_ONLY_A_PART = re.compile(r"start: answer\nanswer: @(\w+)\n")
"""A grammar that is one of its parts and nothing else."""


class _SglangStored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: list[Hash]
    token_ids: list[Uint32 | list[int]]
    block_size: int
    parent_block_hash: Hash | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None


_CACHE_EVENTS: msgspec.msgpack.Decoder[_SglangStored | Removed | Cleared] = msgspec.msgpack.Decoder(
    _SglangStored | Removed | Cleared
)


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


Logprob = tuple[float | None, Uint32, str | None]
"""The value of one token, its id, and its text or nothing."""


class _SglangMeta(msgspec.Struct):
    finish_reason: _Finish | None = None
    cached_tokens: object = None
    output_token_logprobs: list[Logprob] | None = None
    output_top_logprobs: list[list[Logprob] | None] | None = None


class _SglangEvent(msgspec.Struct):
    output_ids: list[Uint32] = []
    meta_info: _SglangMeta | None = None
    error: object = None


_EVENTS = msgspec.json.Decoder(_SglangEvent)


class _SglangAnswer:
    """Reads one answer: what each chunk adds to those before it."""

    def __init__(self, num_logprobs: int | None, *, is_incremental: bool) -> None:
        self._num_logprobs = num_logprobs
        self._is_incremental = is_incremental
        self._num_known = 0

    def read(self, event: bytes) -> Chunk:
        found = _EVENTS.decode(event)
        if found.error:
            return Chunk(refusal=refusal_of(event, 200))
        meta = found.meta_info
        if meta is None:
            raise ValueError("a chunk without meta_info")
        if meta.finish_reason is not None and meta.finish_reason.type == "abort":
            return _failure(meta.finish_reason.status_code, meta.finish_reason.message or "it was aborted")
        first = 0 if self._is_incremental else self._num_known
        if len(found.output_ids) < first:
            raise ValueError(f"{len(found.output_ids)} tokens, after {first}")
        token_ids = tuple(found.output_ids[first:])
        logprobs = self._logprobs(meta, first, len(token_ids))
        self._num_known += len(token_ids)
        finish = None if meta.finish_reason is None else meta.finish_reason.type
        finished = None if finish is None else _FINISHES.get(finish, FinishReason.ERROR)
        return Chunk((Delta(token_ids, finished, logprobs),), meta.cached_tokens)

    def _logprobs(self, meta: _SglangMeta, first: int, number: int) -> tuple[TokenLogprobs, ...] | None:
        """Raises ValueError if a token has none."""
        if self._num_logprobs is None:
            return None
        chosen = (meta.output_token_logprobs or [])[first : first + number]
        tops = (meta.output_top_logprobs or [None] * (first + number))[first : first + number]
        if len(chosen) < number or len(tops) < number:
            raise ValueError(f"log-probabilities of {len(chosen)} tokens, not of {number}")
        return tuple(
            TokenLogprobs(
                token_id,
                0.0 if value is None else value,
                tuple((each[1], each[0] or 0.0) for each in (top or [])[: self._num_logprobs]),
            )
            for (value, token_id, _), top in zip(chosen, tops, strict=True)
        )


def _failure(status: int | None, message: str) -> Chunk:
    return Chunk(refusal=refusal_of(msgspec.json.encode({"message": message}), status or 500))


@dataclass(frozen=True, slots=True)
class SglangDialect:
    """`priority_sign` is that of its priorities against ours; None where it takes none."""

    model: ServerModel
    sizes: CacheSizes
    source: EventSource | None
    rank: int | None
    is_incremental: bool
    priority_sign: int | None
    defaults_in_file: Sequence[str]
    generate_path: ClassVar[str] = "/generate"
    look_paths: ClassVar[Sequence[str]] = ("/v1/loads?include=core", "/server_info")
    advice: ClassVar[str] = (
        "start SGLang with --kv-events-config"
        ' \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
    )
    advice_on_cached: ClassVar[str] = "SGLang reports it with every answer"
    why_no_nixl: ClassVar[str] = "SGLang's bootstrap is not supported yet"

    def body(self, request: EngineRequest, name: str, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
        submit, sampling = request.submit, request.sampling
        held = bool(sampling.grammar)
        ends = end_token_ids(request, eos_token_ids)
        has_no_end = sampling.ignore_eos and not held
        if has_no_end and ends:  # it looks at no stop tokens then
            raise RequestRefused(
                RefusalCode.INVALID_REQUEST, "SGLang takes no stop_token_ids together with ignore_eos"
            )
        num_before = submit.num_output_tokens
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens - num_before,
            "min_new_tokens": 0 if held else max(0, sampling.min_tokens - num_before),
            **said_parameters(sampling),
            "stop_token_ids": ends,
            "ignore_eos": has_no_end,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if parameters.get("top_k") == 0:
            parameters["top_k"] = -1
        if sampling.is_seeded:
            parameters["sampling_seed"] = resumed_seed(request) % _MOST_SEED
        if bias := resumed_logit_bias(request):
            parameters["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
        if held:
            parameters["json_schema"] = _json_schema(sampling.grammar)
        body: dict[str, Any] = {
            "input_ids": list(request.token_ids),
            "rid": name,
            "session_id": name,
            "stream": True,
            "cache_salt": submit.root.hex(),
            "sampling_params": parameters,
        }
        if submit.adapter is not None:
            body["lora_path"] = submit.adapter
        if self.rank is not None:
            body["routed_dp_rank"] = self.rank
        if self.priority_sign is not None:
            body["priority"] = self.priority_sign * submit.priority
        if sampling.num_logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.num_logprobs}
        return body

    def reader(self, request: EngineRequest) -> Reader:
        return _SglangAnswer(request.sampling.num_logprobs, is_incremental=self.is_incremental).read

    def most_bytes(self, request: EngineRequest) -> int:
        sampling = request.sampling
        num_entries = 0 if sampling.num_logprobs is None else 1 + sampling.num_logprobs
        token_bytes = _TOKEN_BYTES + num_entries * _LOGPROB_BYTES
        return _MOST_OTHER_BYTES + sampling.max_tokens * token_bytes

    def cache_event(self, raw: msgspec.Raw) -> ServerEvent:
        event = _CACHE_EVENTS.decode(raw)
        if not isinstance(event, _SglangStored):
            return event
        # With a draft model, each token of a page is a pair of two: their hashes are not ours to make.
        plain = [token for token in event.token_ids if isinstance(token, int)]
        is_plain = len(plain) == len(event.token_ids)
        is_first = event.parent_block_hash is None
        return Stored(
            event.block_hashes,
            plain,
            event.block_size,
            event.parent_block_hash,
            event.medium,
            [[event.cache_salt]] if is_first and event.cache_salt is not None else None,
            session_id=event.session_id,
            lookahead_token_ids=None if is_plain else [[0]],
        )

    def load(self, answers: Sequence[bytes]) -> ServerLoad:
        loads, info = answers
        started = started_at(json.loads(info))
        for load in json.loads(loads)["loads"]:
            if load.get("dp_rank", 0) == (self.rank or 0):
                share = min(1.0, max(0.0, float(load.get("token_usage", 0.0))))
                return ServerLoad(
                    started, bounded(load["num_running_reqs"]), bounded(load["num_waiting_reqs"]), share
                )
        raise ValueError(f"it has no rank {self.rank or 0}")


def started_at(info: Mapping[str, Any]) -> str:
    """Return a digest of how long each part of the start took: another start took another time."""
    return hashlib.sha256(json.dumps(info.get("startup_time"), sort_keys=True).encode()).hexdigest()[:16]


def read_sglang(
    info: Mapping[str, Any], model: ServerModel, url: str, *, rank: int | None, block_size: int | None
) -> SglangDialect:
    """Read what `/server_info` says. Raises StartupError."""
    try:
        if info.get("disable_radix_cache"):
            raise StartupError("the server caches no prefixes: start it without --disable-radix-cache")
        events = info.get("kv_events")
        page = int((events or info).get("block_size") or info.get("page_size") or 1)
        num_ranks = ranks_of(info)
        if (rank or 0) >= num_ranks:
            raise StartupError(f"the server has no rank {rank}: it has {num_ranks}")
        return SglangDialect(
            model._replace(root=str(info.get("model_path") or model.root)),
            _sizes(page, int(info["max_total_num_tokens"]), block_size),
            None if not events else _source(events, rank or 0, url),
            rank,
            bool(info.get("incremental_streaming_output")),
            _priority_sign(info),
            # It applies them to the bodies of its other API only, and not at all with "openai".
            () if info.get("sampling_defaults") == "openai" else NAMES,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"the server's own description cannot be read: {error!r}") from error


def ranks_of(info: Mapping[str, Any]) -> int:
    """Raises ValueError or TypeError."""
    events = info.get("kv_events")
    return int((events if isinstance(events, dict) else info).get("dp_size") or 1)


def _sizes(page: int, num_tokens: int, block_size: int | None) -> CacheSizes:
    size = block_size or page * -(-LEAST_BLOCK_TOKENS // page)
    if page < 1 or size % page:
        raise StartupError(f"the server's pages have {page} tokens, and block_size {size} is no multiple")
    if num_tokens < size:
        raise StartupError(f"the server says that its cache has {num_tokens} tokens")
    return CacheSizes(size, num_tokens // size, page).believed()


def _source(events: Mapping[str, Any], rank: int, url: str) -> EventSource:
    host = urlsplit(url).hostname or "127.0.0.1"
    its_host = str(events["endpoint_host"])
    endpoint, binds = reachable(f"tcp://{its_host}:{int(events['endpoint_port_base']) + rank}", host)
    replay = events.get("replay_endpoint_port_base")
    replays = None if replay is None else reachable(f"tcp://{its_host}:{int(replay) + rank}", host)[0]
    return EventSource(endpoint, replays, str(events.get("topic") or ""), binds)


def _priority_sign(info: Mapping[str, Any]) -> int | None:
    """Ours are served first where they are lower."""
    if not info.get("enable_priority_scheduling"):
        return None
    return 1 if info.get("schedule_low_priority_values_first") else -1


def _json_schema(grammar: str) -> str:
    """Return the schema of a grammar that is one and nothing else. Raises RequestRefused."""
    whole, *parts = json.loads(grammar)["grammars"]
    found = _ONLY_A_PART.fullmatch(whole["lark_grammar"])
    for part in parts:
        if found is not None and part["name"] == found[1] and "json_schema" in part:
            return json.dumps(part["json_schema"])
    raise RequestRefused(RefusalCode.INVALID_REQUEST, "SGLang takes a JSON schema, and no other grammar")
