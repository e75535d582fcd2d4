"""A request as the server's `/v1/completions` takes it, and its answer as the server streams it.

Pure. Owns the body and the shape of a chunk.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from replicas.engine import EngineRequest, RequestRefused
from replicas.protocol.frames import FinishReason, RefusalCode, TokenLogprobs
from replicas.scheduling.resuming import end_token_ids, resumed_logit_bias, resumed_seed

_MOST_SEED = 2**63
"""Servers take seeds of 63 bits."""

_TOKEN_ID = "token_id:"

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


class Logprobs(msgspec.Struct):
    """Parallel lists, an entry a token; tokens are `token_id:ID`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: CachedTokens | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class Problem(msgspec.Struct):
    message: str = "no reason is given"
    code: int | str | None = None


class Chunk(msgspec.Struct):
    """One event of the stream. The last has the usage and no choice."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Problem | None = None


CHUNKS = msgspec.json.Decoder(Chunk)


def body_of(
    request: EngineRequest, name: str, served_name: str, eos_token_ids: tuple[int, ...]
) -> dict[str, Any]:
    """The body of a request; `name` comes back with the events of its blocks. Raises RequestRefused."""
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
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": resumed_seed(request) % _MOST_SEED,
        # As with vLLM in the process: the ends are stop tokens, so that all of them are known.
        "stop_token_ids": end_token_ids(request, eos_token_ids),
        "ignore_eos": True,
    }
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
    if not name.startswith(_TOKEN_ID):
        raise ValueError(f"{name!r} is no token id")
    return int(name[len(_TOKEN_ID) :])


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
