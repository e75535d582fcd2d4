"""RequestExplanation: builds the explanation of one request's prompts, from preparation to its end.

Owns the timing. The causes are found when the replica has reported what it read. The nearest earlier prompt
is found then if tokens may be lost to a change, or if there is time to find the place where the two part;
otherwise when the explanation is asked for. Of a large body it is found before the prompt is served. The
place in the client's body is searched within a time budget: in a small body when the request has ended,
unless all of the prompt was read; in a large one in a thread meanwhile. An explanation is stored when the
request ends, and again when its place arrives later.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from router.api.api_request import ApiRequest, Prompt
from router.caller import Caller, Right
from router.explain.chain_tree import NamespaceName
from router.explain.diagnosis import NOT_FOUND, Diagnosis, diagnosis
from router.explain.explanation import Explanation, PromptExplanation, packed, placed, prompt_explanation
from router.explain.image_places import image_differs
from router.explain.miss_explainer import MissExplainer
from router.explain.outline import NO_OUTLINE
from router.explain.places import Place, PlaceKind
from router.explain.remembered_prompts import Nearest, PromptFacts, RememberedPrompt
from router.explain.repeats import Run
from router.features.explanations.store import ExplanationStore, is_small
from router.generation import Generation
from router.misses import Cause
from router.prompt.catalog import ServedModel


@dataclass(slots=True)
class _Prompt:
    facts: PromptFacts
    position: int
    generation: Generation
    nearest: Nearest | None = None
    is_compared: bool = False
    remembered: RememberedPrompt | None = None
    explanation: PromptExplanation | None = None


class _Sought(NamedTuple):
    """A place that is still to be looked for."""

    body: bytes
    generation: Generation
    position: int
    number: int


@dataclass(slots=True)
class RequestExplanation:
    """Builds one request's explanation; created when the request is prepared."""

    store: ExplanationStore
    explainer: MissExplainer
    request: ApiRequest
    _prompts: dict[int, _Prompt] = field(default_factory=dict)
    _body: bytes = b""
    """Until the place in it is found, or not looked for."""
    _place: "asyncio.Future[Place | None] | None" = None
    _sought: _Sought | None = None
    _image: Place | None = None
    """The place of a differing image; nothing else is searched then."""
    _placed: _Prompt | None = None
    """The prompt in which that is looked for: the first that parts from an earlier one."""

    def begin(self, body: bytes) -> None:
        """Find the nearest earlier prompts at once if the body is large, which is not kept; if there are
        images, which the live page names; and of several prompts, which are not compared with each other."""
        self._body = body
        prompts = self.request.prompts
        is_at_once = len(prompts) > 1 or bool(prompts[0].generation.media) or not is_small(body)
        for position, prompt in enumerate(prompts):
            facts = facts_of(prompt, self.request.caller, self.request.model)
            known = self._prompts[prompt.first_index] = _Prompt(facts, position, prompt.generation)
            if is_at_once:
                self._compare(known)
            if self.request.compared_id is not None and position == 0:
                prompt.diagnosis = self._diagnosis(facts, self.request.compared_id)
        if is_at_once:
            self._body = b""

    @property
    def _across_salts(self) -> bool:
        return self.request.caller.key_id is not None and self.request.caller.may(Right.EXPLAIN)

    def _diagnosis(self, facts: PromptFacts, compared_id: str) -> Diagnosis:
        remembered = self.store.remembered
        earlier = remembered.find(facts.tenant, compared_id)
        if earlier is None or not (self._across_salts or earlier.salt_tag == facts.salt_tag):
            return NOT_FOUND
        return diagnosis(facts, earlier, remembered.compare(facts, earlier))

    def _compare(self, known: _Prompt) -> None:
        """Find the nearest earlier prompt, and look for the place where the first prompt parts from it."""
        known.is_compared = True
        known.nearest = self.store.remembered.nearest(known.facts, across_salts=self._across_salts)
        number = None if known.nearest is None else known.nearest.diverges_at
        is_first = self._place is None and self._sought is None and self._image is None
        if number is None or not is_first:
            return
        self._placed = known
        path = known.generation.image_path(number)
        if path is not None:
            says = _image_differs(known.generation, path)
            self._image = Place(path, PlaceKind.VALUE, is_certain=True, sentence=says)
            return
        sought = _Sought(self._body, known.generation, known.position, number)
        if is_small(self._body):
            self._sought = sought
        else:
            self._place = self.store.place_soon(self.request.model.tokenizer, *sought)

    def read(self, prompt: Prompt) -> None:
        """A replica has said what of the prompt it read from cache."""
        usage = prompt.usage
        assert usage is not None
        known = self._prompts.get(prompt.first_index)
        found = self.explainer.misses(
            prompt.generation,
            prompt.decision,
            usage,
            decided_at=self.request.prepared_at,
            repeated=None if known is None else partial(self._repeated, known),
        )
        prompt.misses = found
        if known is None:
            return
        is_placed = known.remembered is None and found.cause is not Cause.HIT and not known.is_compared
        if is_placed and self.store.may_place(has_lost=any(span.is_lost for span in found.spans)):
            self._compare(known)
        self._body = b""
        nearest = known.nearest
        number = None if nearest is None else nearest.diverges_at
        if number is not None and number >= usage.num_cached_tokens:
            path = prompt.generation.image_path(number)
            prompt.difference = None if path is None else _image_differs(prompt.generation, path)
        known.explanation = prompt_explanation(known.facts, usage, prompt.decision, found, nearest)
        if known.remembered is None:
            self._remember(known)

    def _remember(self, known: _Prompt) -> None:
        ids = () if known.position else (self.request.request_id, self.request.writer.answer_id)
        made = known.remembered = self.store.remembered.remember(known.facts, ids, self.request.arrived_at)
        if made is not None:
            made.is_compared, made.across_salts = known.is_compared, self._across_salts

    def _repeated(self, known: _Prompt, start: int) -> tuple[Cause, Sequence[Run]]:
        """Return what the nearest prompt also has from a token on, where this one may have lost it."""
        if not known.is_compared and known.remembered is None:
            self._compare(known)
        nearest = known.nearest
        if nearest is None or not (nearest.goes_on or nearest.num_common_tokens is None):
            return Cause.PREFIX_CHANGED, ()
        cause = Cause.PREFIX_CHANGED if nearest.goes_on else Cause.OTHER_NAMESPACE
        return cause, self.store.remembered.repeats(known.facts, nearest, start)

    def prompts_so_far(self) -> list[PromptExplanation]:
        return [known.explanation for known in self._prompts.values() if known.explanation is not None]

    def end(self, error: str | None) -> None:
        """The request has ended: what is known is remembered."""
        if not self._prompts:
            return
        first = self._prompts[0]
        if first.remembered is None and error is not None:
            self._remember(first)
        if first.remembered is None:
            return
        if self._place is not None and not self._place.done():
            self._place.add_done_callback(lambda _: self._tell(error))
        self._tell(error)

    def _tell(self, error: str | None) -> None:
        first = self._prompts[0]
        assert first.remembered is not None
        known = self._placed or first
        if known.explanation is not None:
            known.explanation = placed(known.explanation, self._found(known.explanation))
        explanation = Explanation(
            self.request.request_id,
            self.request.writer.answer_id,
            self.request.arrived_at,
            self.request.model.name,
            self.request.route,
            error,
            tuple(self.prompts_so_far()),
        )
        self.store.remembered.tell(first.remembered, first.facts.tenant, packed(explanation))

    def _found(self, explanation: PromptExplanation) -> Place | None:
        if self._image is not None:
            return self._image
        sought, looked = self._sought, self._place
        if sought is not None:
            self._sought = None
            if explanation.cause == Cause.HIT:
                return None
            tokenizer, has_lost = self.request.model.tokenizer, explanation.num_lost_tokens > 0
            return self.store.place_now(tokenizer, *sought, has_lost=has_lost)
        if looked is None or not looked.done() or looked.cancelled() or looked.exception():
            return None
        return looked.result()


def _image_differs(generation: Generation, path: str) -> str:
    return image_differs(path, [media.path for media in generation.media])


def facts_of(prompt: Prompt, caller: Caller, model: ServedModel) -> PromptFacts:
    generation = prompt.generation
    adapter = None if generation.adapter is None else generation.adapter.name
    return PromptFacts(
        tenant=caller.tenant.name,
        root=generation.submit.root,
        namespace=NamespaceName(generation.model, adapter, generation.tenant),
        block_size=model.card.block_size,
        packed_hashes=b"".join(generation.block_hashes),
        packed_tokens=generation.with_image_ids() if generation.media else generation.submit.packed_tokens,
        salt_tag=generation.salt_tag,
        outline=prompt.outline or NO_OUTLINE,
        template_tag=model.template.tag,
        media=tuple((span.start, span.start + span.length) for span in generation.submit.media),
    )
