"""ApiRequest: what a request of a client asks for, ready to run, and the text that has come of it so far.

Owns the state of each choice. Two dialects write it out in their own way; neither HTTP nor routing is
known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replicas.protocol.blocks import pack_token_ids
from replicas.protocol.frames import (
    FinishReason,
    PromptUsage,
    SamplingParams,
    Submit,
    TokenDelta,
    TokenLogprobs,
)
from router.api.context import ApiContext
from router.api.openai_caching import keeps_of
from router.api.sampling import GenerationFields, stop_strings
from router.generation import Generation
from router.keeping import leases_of
from router.prompt.catalog import ServedModel
from router.prompt.detokenizer import Detokenizer
from router.routing.bucket import bucket_of
from router.routing.decision import Decision

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


MOST_HELD = 256
"""Tokens that are turned into text together: few enough that nobody waits for them."""


class ChoiceOutput:
    """One choice as it grows: feed it the choice's deltas."""

    __slots__ = ("_detokenizer", "_held", "_silent", "finish_reason", "logprobs", "num_tokens", "parts")

    def __init__(self, detokenizer: Detokenizer, silent_token_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._silent = silent_token_ids
        self._held: list[int] = []
        self.parts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def has_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def found_stop(self) -> bool:
        """A stop string ended this choice, so that the engine has yet to be told."""
        return self._detokenizer.stop_string is not None

    @property
    def has_stop_strings(self) -> bool:
        return self._detokenizer.has_stop_strings

    def hold(self, delta: TokenDelta) -> None:
        """A delta in the middle of an answer of which no text is wanted yet: it comes with a later one."""
        self.num_tokens += len(delta.token_ids)
        self._held += delta.token_ids
        if len(self._held) >= MOST_HELD:
            self.parts.append(self._detokenizer.add(self._held))
            self._held.clear()

    def add(self, delta: TokenDelta) -> str:
        """The new text. Sets `finish_reason` with the last of it."""
        token_ids = delta.token_ids
        finish = delta.finish_reason
        self.num_tokens += len(token_ids)
        if finish is FinishReason.STOP and token_ids and token_ids[-1] in self._silent:
            token_ids = token_ids[:-1]
        if self._held:
            token_ids = (*self._held, *token_ids)
            self._held.clear()
        text = self._detokenizer.add(token_ids)
        if finish is not None:
            text += self._detokenizer.finish()
            self.finish_reason = finish.value
        if self.found_stop:
            self.finish_reason = FinishReason.STOP.value
        return text


@dataclass(slots=True)
class Prompt:
    """One prompt of the request and its choices, which count from `first_index` on in the answer."""

    generation: Generation
    first_index: int
    outputs: list[ChoiceOutput]
    echo: str = ""
    decision: Decision | None = None
    """Of the replica that has answered; before, of the latest attempt."""
    decision_seconds: float | None = None
    usage: PromptUsage | None = None

    def usage_or_bare(self) -> PromptUsage:
        return self.usage or PromptUsage(len(self.generation.token_ids), 0, 0)


class Dialect(Protocol):
    """How an answer is written. `text` and the like return the bytes of whole events."""

    def open(self, prompt: Prompt, choice: int) -> bytes: ...
    def text(self, prompt: Prompt, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes: ...
    def close(self, prompt: Prompt, choice: int) -> bytes: ...
    def end(self, usage: dict[str, Any]) -> bytes: ...
    def whole(self, usage: dict[str, Any]) -> bytes: ...


@dataclass(slots=True)
class ApiRequest:
    model: ServedModel
    prompts: list[Prompt]
    stream: bool
    dialect: Dialect


def make_prompt(
    context: ApiContext,
    model: ServedModel,
    request: GenerationFields,
    token_ids: list[int],
    sampling: SamplingParams,
    *,
    first_index: int = 0,
    num_stable_tokens: int | None = None,
) -> Prompt:
    """Everything that routing, engine and answer need of one prompt of the request."""
    card = model.card
    root = model.root(None, request.cache_salt)
    packed_tokens = pack_token_ids(token_ids)
    key = request.prompt_cache_key
    keeps = keeps_of(request.prompt_cache_retention, request.prompt_cache_options)
    generation = Generation(
        model=card.name,
        token_ids=token_ids,
        submit=Submit(
            submit_id=0,
            packed_tokens=packed_tokens,
            sampling=sampling,
            root=root,
            num_choices=request.n or 1,
            priority=context.priority(request.priority),
            adapter=None if model.adapter is None else model.adapter.name,
            user=context.catalog.user_tag(request.end_user),
            leases=leases_of(keeps, len(token_ids), card.block_size),
        ),
        block_hashes=model.block_hashes(root, packed_tokens),
        bucket=bucket_of(root, key, token_ids, num_stable_tokens, card.block_size),
        adapter=model.adapter,
        tenant=model.tenant_label(request.cache_salt),
        prompt_cache_key=key,
    )
    silent = model.eos_token_ids
    if sampling.stop_token_ids:
        silent = silent.union(sampling.stop_token_ids)
    stop = stop_strings(request.stop)
    outputs = [
        ChoiceOutput(model.tokenizer.new_detokenizer(stop, min_tokens=sampling.min_tokens), silent)
        for _ in range(generation.num_choices)
    ]
    return Prompt(generation, first_index, outputs)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
