"""ApiRequest: what a request of a client asks for, ready to run, and what has come of it so far.

Owns the way from a prompt's tokens to a Generation. Dialects write the answer out in their own way; neither
HTTP nor routing is known here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from replicas.protocol.blocks import ImageTokens, pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit, TokenLogprobs
from replicas.protocol.images import named_media
from replicas.protocol.prefix_leases import MAX_LEASES, PrefixLease
from router.answers.parser import AnswerParser
from router.answers.parts import Part
from router.answers.stop_strings import StopStrings
from router.api.answer_usage import AnswerUsage
from router.api.chat_history import Turn, tenant_label
from router.api.choice_output import ChoiceOutput
from router.api.context import ApiContext
from router.api.sampling import GenerationFields, stop_strings
from router.caller import OPEN_CALLER, Caller
from router.edge.http_error import HttpError
from router.explain.diagnosis import Diagnosis
from router.explain.miss_explainer import salt_tag
from router.explain.outline import PromptOutline
from router.feature import Feature
from router.generation import Generation
from router.keeping import LeaseRequest, leases_of
from router.misses import Misses
from router.prompt.catalog import ServedModel
from router.prompt.images import Media, PromptImage
from router.routing.bucket import bucket_of
from router.routing.decision import Decision


@dataclass(slots=True)
class Prompt:
    """One prompt of the request and its choices, which count from `first_index` on in the answer."""

    generation: Generation
    first_index: int
    outputs: list[ChoiceOutput]
    echo: str = ""
    decision: Decision | None = None
    """The decision for the replica that answered, else the latest attempt's."""
    decision_seconds: float | None = None
    usage: PromptUsage | None = None
    misses: Misses | None = None
    """Why what the usage says was not read from cache was not."""
    difference: str | None = None
    """The image that distinguishes the prompt from the nearest earlier one, if it is an image."""
    outline: PromptOutline | None = None
    """Outline of a conversation."""
    diagnosis: Diagnosis | None = None
    """Beside an earlier request that the client has named; None if it is not known."""
    turn: Turn | None = None
    """Key under which its answers are remembered."""
    num_own_leases: int = 0
    """The last leases of its submit, for which the client has not asked."""

    @property
    def wished_leases(self) -> Sequence[PrefixLease]:
        """Return the leases that the client asked for."""
        leases = self.generation.submit.leases
        return leases[: len(leases) - self.num_own_leases]

    def keep_for(self, seconds: int, block_size: int) -> None:
        """Ask for a lease on all of it on our own account, beside those that the client wishes."""
        submit = self.generation.submit
        own = leases_of([LeaseRequest(seconds)], len(self.generation.token_ids), block_size)
        if len(submit.leases) < MAX_LEASES:
            self.num_own_leases = 1
            submit = msgspec.structs.replace(submit, leases=(*submit.leases, *own))
            self.generation = replace(self.generation, submit=submit)

    def usage_or_bare(self) -> PromptUsage:
        return self.usage or PromptUsage(len(self.generation.token_ids), 0, 0)


class AnswerWriter(Protocol):
    """How a dialect writes an answer, whose body names it by `answer_id`. All but `whole` return the bytes of
    whole events of a stream, or none.

    Of each choice `open` comes first, with the prompt's usage known, then its parts, then `close` with its
    `finish_reason` known; `end` comes once all choices are closed. Log-probabilities come with a part of
    theirs, or with an empty text. `keep_alive` is what a stream that is silent for long gets, between events.
    """

    @property
    def answer_id(self) -> str: ...
    @property
    def keep_alive(self) -> bytes: ...
    def open(self, prompt: Prompt, choice: int) -> bytes: ...
    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes: ...
    def close(self, prompt: Prompt, choice: int) -> bytes: ...
    def end(self, usage: AnswerUsage) -> bytes: ...
    def whole(self, usage: AnswerUsage) -> bytes: ...


@dataclass(slots=True)
class ApiRequest:
    model: ServedModel
    prompts: list[Prompt]
    stream: bool
    writer: AnswerWriter
    failed: Callable[[HttpError], bytes] | None = None
    """Writes the end of a failed stream, in dialects where it depends on what was written."""
    compared_id: str | None = None
    """The answer that its prompt is to be compared with."""
    during: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Further context held while it runs."""
    request_id: str = ""
    caller: Caller = OPEN_CALLER
    path: str = ""
    """The path that its client asked for."""
    route: str = ""
    """Name of its route in metrics."""
    arrived_at: float = 0.0
    """In seconds since 1970."""
    prepared_at: float = 0.0
    """The same; zero before."""
    state: dict[Feature, Any] = field(default_factory=dict)
    """Notes of features, each under the feature itself."""

    def num_used_tokens(self) -> int | None:
        """Count the answers' tokens so far; None if no replica was chosen for any."""
        if all(prompt.usage is None and prompt.decision is None for prompt in self.prompts):
            return None
        return sum(output.num_tokens for prompt in self.prompts for output in prompt.outputs)

    def usage(self) -> AnswerUsage:
        outputs = [output for prompt in self.prompts for output in prompt.outputs]
        return AnswerUsage(
            prompts=[prompt.usage_or_bare() for prompt in self.prompts],
            leases=[prompt.wished_leases for prompt in self.prompts],
            num_output_tokens=sum(output.num_said_tokens for output in outputs),
            num_reasoning_tokens=sum(output.num_reasoning_tokens for output in outputs),
            media=[prompt.generation.submit.media for prompt in self.prompts],
        )


@dataclass(frozen=True, slots=True)
class OutputWishes:
    """Treatment of each choice's tokens: see ChoiceOutput. `new_parser` is called per choice; `shown` are
    special tokens that a parser must see."""

    new_parser: Callable[[], AnswerParser | None] = lambda: None
    shown: frozenset[str] = frozenset()
    one_call: bool = False
    is_silent: bool = False
    is_kept: bool = True


def make_prompt(
    context: ApiContext,
    caller: Caller,
    model: ServedModel,
    request: GenerationFields,
    token_ids: list[int],
    sampling: SamplingParams,
    wishes: OutputWishes,
    *,
    packed_tokens: bytes | None = None,
    keeps: Sequence[LeaseRequest] = (),
    first_index: int = 0,
    num_stable_tokens: int | None = None,
    images: Sequence[PromptImage] = (),
    grammar_seconds: float = 0.0,
) -> Prompt:
    """Everything that routing, engine and answer need of one prompt of the request. `packed_tokens` are the
    token ids, if they have been packed already. `images` are in the order of their tokens."""
    card = model.card
    root = model.root(caller.namespace, request.cache_salt)
    packed_tokens = packed_tokens or pack_token_ids(token_ids)
    published = context.published_beginning(model, packed_tokens) if request.cache_salt is None else None
    key = request.prompt_cache_key
    spans = [ImageTokens(named_media(root, each.digest), each.start, each.length) for each in images]
    bucket = bucket_of(root, key, packed_tokens, num_stable_tokens, card.block_size, spans)
    leases = leases_of(keeps, len(token_ids), card.block_size)
    generation = Generation(
        model=card.name,
        token_ids=token_ids,
        submit=Submit(
            submit_id=0,
            packed_tokens=packed_tokens,
            sampling=sampling,
            root=root,
            num_choices=request.n or 1,
            media=tuple(spans),
            priority=context.priority(request.priority, caller),
            adapter=None if model.adapter is None else model.adapter.name,
            user=context.catalog.user_tag(request.end_user, caller.owner),
            leases=leases,
            bucket=bucket if leases else b"",
            tenant=context.catalog.tenant_tag(caller.owner),
            lease_share=caller.lease_share or 0.0,
            store_share=caller.tenant.limits.store_share or 0.0,
            published=published,
        ),
        block_hashes=model.block_hashes(root, packed_tokens, published, spans),
        bucket=bucket,
        adapter=model.adapter,
        tenant=tenant_label(caller, model, request.cache_salt),
        caller=caller,
        prompt_cache_key=key,
        timeout_seconds=request.timeout,
        salt_tag=salt_tag(request.cache_salt),
        grammar_seconds=grammar_seconds,
        media=[
            Media(span.content_hash, each.content, each.path)
            for span, each in zip(spans, images, strict=True)
        ],
    )
    outputs = [_output(model, request, sampling, wishes) for _ in range(generation.num_choices)]
    return Prompt(generation, first_index, outputs)


def _output(
    model: ServedModel, request: GenerationFields, sampling: SamplingParams, wishes: OutputWishes
) -> ChoiceOutput:
    silent = model.eos_token_ids
    if sampling.stop_token_ids:
        silent = silent.union(sampling.stop_token_ids)
    shown = wishes.shown
    if request.skip_special_tokens is False:
        shown = shown.union(model.tokenizer.special_tokens)
    shows_stop = bool(request.include_stop_str_in_output)
    strings = stop_strings(request.stop)
    stops = StopStrings(strings, min_tokens=sampling.min_tokens, is_shown=shows_stop) if strings else None
    return ChoiceOutput(
        model.tokenizer.new_detokenizer(shown),
        silent,
        wishes.new_parser(),
        stops,
        one_call=wishes.one_call,
        is_silent=wishes.is_silent,
        is_kept=wishes.is_kept,
        shows_stop=shows_stop,
    )
