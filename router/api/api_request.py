"""ApiRequest: a client's request to a route that generates, and its result so far. Prepare: makes it ready.

Owns the way from a prompt's tokens to a Generation. Dialects write the answer; routing is not known here.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from starlette.types import Scope

from replicas.protocol.blocks import BlockHash, ImageTokens, PublishedBeginning, pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit, TokenLogprobs
from replicas.protocol.images import named_media
from replicas.protocol.prefix_leases import MAX_LEASES, PrefixLease
from router.answers.parser import AnswerParser
from router.answers.parts import Part
from router.answers.stop_strings import StopStrings
from router.api.answer_usage import AnswerUsage
from router.api.choice_output import ChoiceOutput
from router.api.context import ApiContext, Decided
from router.api.sampling import GenerationFields, stop_strings
from router.caller import Caller, caller_of
from router.edge.connections import address_of
from router.edge.http_error import HttpError
from router.encoded import EncodedHistory
from router.errors import ErrorKind
from router.explain.diagnosis import Diagnosis
from router.explain.miss_explainer import salt_tag
from router.explain.outline import PromptOutline
from router.feature import Feature
from router.generation import Generation
from router.keeping import LeaseRequest, leases_of
from router.misses import Misses
from router.prompt.catalog import ServedModel
from router.prompt.images import Media, PromptImage
from router.routing.bucket import bucket_of, head_bucket_of
from router.routing.decision import Decision
from router.served import ServedPrompt, ServedRequest, TokenGaps


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

    def decided(self, run: Decided) -> None:
        """Take the decision of the replica that answers, or of the latest attempt."""
        self.decision, self.decision_seconds = run.decision, run.decision_seconds

    def usage_or_bare(self) -> PromptUsage:
        return self.usage or PromptUsage(len(self.generation.token_ids), None, 0)

    def served(self) -> ServedPrompt:
        num_output_tokens = sum([output.num_tokens for output in self.outputs])
        return ServedPrompt(
            self.generation,
            self.decision,
            self.usage,
            num_output_tokens,
            self.decision_seconds,
            num_silent_tokens=num_output_tokens - sum([output.num_said_tokens for output in self.outputs]),
            num_reasoning_tokens=sum([output.num_reasoning_tokens for output in self.outputs]),
            num_own_leases=self.num_own_leases,
            misses=self.misses,
            difference=self.difference,
        )


class AnswerWriter(Protocol):
    """How a dialect writes an answer, whose body names it by `answer_id`. All but `whole` return the bytes of
    whole events of a stream, or none.

    Of each choice `open` comes first, with the prompt's usage known, then its parts, then `close` with its
    `finish_reason` known; `end` comes once all choices are closed. Log-probabilities come with a part of
    theirs, or with an empty text. `keep_alive` is what a stream that is silent for long gets, between events.
    """

    answer_id: str

    @property
    def keep_alive(self) -> bytes: ...
    def open(self, prompt: Prompt, choice: int) -> bytes: ...
    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes: ...
    def close(self, prompt: Prompt, choice: int) -> bytes: ...
    def end(self, usage: AnswerUsage) -> bytes: ...
    def whole(self, usage: AnswerUsage) -> bytes: ...


@dataclass(slots=True)
class ApiRequest:
    """One request to a route that generates, from its arrival to its end.

    Its endpoint writes it; the preparation of its route sets the model, prompts and writer, and may put
    another body in the place of the client's. Durations count from its arrival, in seconds.
    """

    scope: Scope
    body: bytes = b""
    """Empty once it is prepared."""
    request_id: str = ""
    trace_id: str | None = None
    route: str = ""
    """The name of its route in metrics."""
    arrived_at: float = 0.0
    """In seconds since 1970."""
    caller: Caller = field(init=False)
    address: str | None = field(init=False)
    """The client's address."""
    model: ServedModel = field(init=False)
    asked_model: str = ""
    """The name that it has asked for its model by."""
    prompts: list[Prompt] = field(default_factory=list)
    stream: bool = False
    writer: AnswerWriter = field(init=False)
    failed: Callable[[HttpError], bytes] | None = None
    """Writes the end of a failed stream, in dialects where it depends on what was written."""
    compared_id: str | None = None
    """The answer that its prompt is to be compared with."""
    end_user: str | None = None
    """Whom its client asks for."""
    offers_tools: bool = False
    history: EncodedHistory | None = None
    """By what its conversation is known again, if it is one."""
    state: dict[Feature, Any] = field(default_factory=dict)
    """Notes of features, each under the feature itself."""
    status: int = 200
    error: str | None = None
    error_kind: ErrorKind | None = None
    model_name: str | None = None
    """The model or adapter that it asks for, if that is served."""
    read_seconds: float | None = None
    prepared_seconds: float | None = None
    first_token_seconds: float | None = None
    gaps: TokenGaps | None = None
    """For one continuation of one prompt."""

    def __post_init__(self) -> None:
        self.caller = caller_of(self.scope)
        self.address = address_of(self.scope.get("client"))

    @property
    def path(self) -> str:
        """Return the path that the client asked for."""
        path: str = self.scope["path"]
        return path

    @property
    def share_owner(self) -> str:
        """The owner of its share of what requests take in turns: the tenant, or the address without keys."""
        return self.caller.owner or self.address or ""

    @property
    def prepared_at(self) -> float:
        """In seconds since 1970."""
        return self.arrived_at + (self.prepared_seconds or 0.0)

    @property
    def is_prepared(self) -> bool:
        return bool(self.prompts)

    @property
    def generations(self) -> list[Generation]:
        return [prompt.generation for prompt in self.prompts]

    def end_with(self, error: str, kind: ErrorKind) -> None:
        self.error, self.error_kind = error, kind

    def num_used_tokens(self) -> int | None:
        """Count the answers' tokens so far, and those of a passed body beyond what is taken for it; None if
        no replica was chosen for any."""
        if all(prompt.usage is None and prompt.decision is None for prompt in self.prompts):
            return None
        num_more = sum(
            prompt.usage.num_prompt_tokens - len(prompt.generation.token_ids)
            for prompt in self.prompts
            if prompt.usage is not None and prompt.generation.submit.route
        )
        return num_more + sum(output.num_tokens for prompt in self.prompts for output in prompt.outputs)

    def usage(self) -> AnswerUsage:
        outputs = [output for prompt in self.prompts for output in prompt.outputs]
        return AnswerUsage(
            prompts=[prompt.usage_or_bare() for prompt in self.prompts],
            leases=[prompt.wished_leases for prompt in self.prompts],
            num_output_tokens=sum(output.num_said_tokens for output in outputs),
            num_reasoning_tokens=sum(output.num_reasoning_tokens for output in outputs),
            media=[prompt.generation.submit.media for prompt in self.prompts],
        )

    def served(self, ended_seconds: float) -> ServedRequest:
        """Return what has become of it, at its end."""
        return ServedRequest(
            request_id=self.request_id,
            trace_id=self.trace_id,
            route=self.route,
            model=self.model_name,
            status=self.status,
            error=self.error,
            error_kind=self.error_kind,
            arrived_at=self.arrived_at,
            read_seconds=self.read_seconds,
            prepared_seconds=self.prepared_seconds,
            first_token_seconds=self.first_token_seconds,
            ended_seconds=ended_seconds,
            token_gaps=self.gaps,
            caller=self.caller,
            answer_id=self.writer.answer_id if self.prompts else None,
            is_stream=self.stream,
            prompts=tuple([prompt.served() for prompt in self.prompts]),
        )


Prepare = Callable[[ApiContext, ApiRequest], Awaitable[None]]
"""Makes a request ready to run. Raises a RouterError."""


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
    num_head_tokens: int | None = None,
    images: Sequence[PromptImage] = (),
    grammar_seconds: float = 0.0,
) -> Prompt:
    """Everything that routing, engine and answer need of one prompt of the request. `packed_tokens` are the
    token ids, if they have been packed already. `images` are in the order of their tokens."""
    card = model.card
    root = model.root(caller.namespace, request.cache_salt)
    packed_tokens = packed_tokens or pack_token_ids(token_ids)
    published = _beginning(context, model, packed_tokens) if request.cache_salt is None else None
    key = request.prompt_cache_key
    spans, media = _named(root, images) if images else ([], [])
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
        head_bucket=head_bucket_of(root, key, packed_tokens, num_head_tokens, card.block_size),
        adapter=model.adapter,
        tenant=tenant_label(caller, model, request.cache_salt),
        caller=caller,
        prompt_cache_key=key,
        timeout_seconds=request.timeout,
        salt_tag=salt_tag(request.cache_salt),
        grammar_seconds=grammar_seconds,
        media=media,
    )
    outputs = [_output(model, request, sampling, wishes) for _ in range(generation.num_choices)]
    return Prompt(generation, first_index, outputs)


def _named(root: BlockHash, images: Sequence[PromptImage]) -> tuple[list[ImageTokens], list[Media]]:
    """Name images in a namespace: where their tokens are, and what replicas are sent of them."""
    spans = [ImageTokens(named_media(root, each.digest), each.start, each.length) for each in images]
    media = [
        Media(span.content_hash, each.content, each.path) for span, each in zip(spans, images, strict=True)
    ]
    return spans, media


def _beginning(context: ApiContext, model: ServedModel, packed_tokens: bytes) -> PublishedBeginning | None:
    for hook in context.hooks.beginning:
        found = hook(model, packed_tokens)
        if found is not None:
            return found
    return None


def tenant_label(caller: Caller, model: ServedModel, salt: str | None) -> str:
    """Return the tenant of a request, for counts and shares here."""
    return model.tenant_label(salt) if caller.key_id is None else caller.tenant.name


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
