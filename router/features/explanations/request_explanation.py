"""RequestExplanation: builds the explanation of one request's prompts, from preparation to its end.

Owns the timing. The causes are found when the replica has reported what it read. The nearest earlier prompt
is found then if tokens may be lost to a change, otherwise when the explanation is asked for. The place in the
client's body is searched if tokens were lost. All is remembered when the request has ended; a place that is
found later is added.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from replicas.protocol.frames import PromptUsage
from replicas.protocol.hits import num_hit_tokens, num_searched
from router.api.api_request import ApiRequest, Prompt
from router.caller import Caller, Right
from router.edge.http import Header
from router.explain.diagnosis import NOT_FOUND, Diagnosis, diagnosis
from router.explain.explanation import Explanation, header_of, in_tools, placed, prompt_explanation
from router.explain.image_places import image_differs
from router.explain.miss_explainer import MissExplainer, beginning_of
from router.explain.nearest import Digests, Nearest, PromptFacts, RememberedPrompt
from router.explain.outline import NO_OUTLINE
from router.explain.places import Place, PlaceKind
from router.explain.prefix_tree import NamespaceName, Seen, short_key
from router.explain.repeats import Run
from router.features.explanations.place_search import PlaceSearch, is_small
from router.features.explanations.store import ExplanationStore
from router.misses import Cause, Misses
from router.prompt.catalog import ServedModel
from router.routing.overlap import PrefixIndex
from router.served import ServedRequest

NOTHING_MISSED = Misses(Cause.HIT, ())


@dataclass(slots=True)
class _Served:
    """A prompt of which a replica has reported the usage; `after` is the last prompt that was remembered
    then."""

    prompt: Prompt
    usage: PromptUsage
    facts: PromptFacts
    after: int
    misses: Misses = NOTHING_MISSED
    nearest: Nearest | None = None
    is_compared: bool = False


class RequestExplanation:
    """Created when the request is prepared. `index` is the model's, if it has one."""

    def __init__(
        self,
        store: ExplanationStore,
        explainer: MissExplainer,
        places: PlaceSearch,
        request: ApiRequest,
        index: PrefixIndex | None,
    ) -> None:
        self._store = store
        self._explainer = explainer
        self._places = places
        self._request = request
        self._index = index
        self._served: dict[int, _Served] = {}
        """By the prompt's first index."""
        self._body: bytes | None = None
        """Held until nothing is looked for in it any more."""
        self._placed: _Served | None = None
        """The first prompt that lost tokens and parts from an earlier one."""
        self._number: int | None = None
        """The token where it does, until its place is searched."""
        self._place: Place | asyncio.Future[Place | None] | None = None

    def begin(self, body: bytes) -> None:
        self._body = self._places.hold(body)
        compared_id = self._request.compared_id
        if compared_id is not None:
            first = self._request.prompts[0]
            first.diagnosis = self._diagnosis(self._facts(first), compared_id)

    @property
    def _across_salts(self) -> bool:
        caller = self._request.caller
        return caller.key_id is not None and caller.may(Right.EXPLAIN)

    def _facts(self, prompt: Prompt) -> PromptFacts:
        return facts_of(prompt, self._request.caller, self._request.model, self._store.memory.digests)

    def _diagnosis(self, facts: PromptFacts, compared_id: str) -> Diagnosis:
        memory = self._store.memory
        earlier = memory.find(facts.tenant, compared_id)
        if earlier is None or not (self._across_salts or earlier.salt_tag == facts.salt_tag):
            return NOT_FOUND
        return diagnosis(facts, earlier, memory.compare(facts, earlier))

    def read(self, prompt: Prompt) -> None:
        """A replica has said what of the prompt it read from cache."""
        usage = prompt.usage
        assert usage is not None
        memory, request = self._store.memory, self._request
        known = _Served(prompt, usage, self._facts(prompt), memory.last_number)
        self._served[prompt.first_index] = known
        prompt.misses = known.misses = found = self._explainer.misses(
            known.facts,
            prompt.decision,
            usage,
            decided_at=request.prepared_at,
            repeated=partial(self._repeated, known) if memory.is_on else None,
        )
        if not memory.is_on:
            return
        has_lost = any(span.is_lost for span in found.spans)
        has_images = bool(prompt.generation.media) and found.cause is not Cause.HIT
        if has_lost or has_images or len(request.prompts) > 1:
            self._compare(known)
            self._look(known, has_lost=has_lost)
        if len(request.prompts) == 1 and self._number is None:
            self._release()

    def _compare(self, known: _Served) -> Nearest | None:
        if not known.is_compared:
            known.is_compared = True
            known.nearest = self._store.memory.nearest(known.facts, across_salts=self._across_salts)
        return known.nearest

    def _repeated(self, known: _Served, start: int) -> tuple[Cause, Sequence[Run]]:
        """Return what the nearest prompt also has from a token on, where this one may have lost it."""
        nearest = self._compare(known)
        if nearest is None or not (nearest.goes_on or nearest.num_common_tokens is None):
            return Cause.PREFIX_CHANGED, ()
        cause = Cause.PREFIX_CHANGED if nearest.goes_on else Cause.OTHER_NAMESPACE
        return cause, self._store.memory.repeats(known.facts, nearest, start)

    def _look(self, known: _Served, *, has_lost: bool) -> None:
        """Look for the place where the prompt parts from its nearest: at an image, which is known at once, in
        a large body from now on, in a small one at the request's end."""
        prompt = known.prompt
        number = None if known.nearest is None else known.nearest.diverges_at
        path = None if number is None else prompt.generation.image_path(number)
        if number is not None and path is not None:
            differs = image_differs(path, [media.path for media in prompt.generation.media])
            if number >= (known.usage.num_cached_tokens or 0):
                prompt.difference = differs
            if self._placed is None:
                self._placed = known
                self._place = Place(path, PlaceKind.VALUE, is_certain=True, sentence=differs)
        elif number is not None and has_lost and self._placed is None:
            self._placed, self._number = known, number
            if self._body is None or not is_small(self._body):
                self._search(known, number)

    def _search(self, known: _Served, number: int) -> None:
        position, token_ids = self._request.prompts.index(known.prompt), known.prompt.generation.token_ids
        tokenizer = self._request.model.tokenizer
        self._place = self._places.search(tokenizer, self._body, token_ids, position, number)
        self._number = None

    def _release(self) -> None:
        if self._body is not None:
            self._places.release(self._body)
            self._body = None

    def headers(self) -> Sequence[Header]:
        """Write `x-kvasir-cache` of the prompts so far."""
        if not self._served or not self._store.memory.is_on:
            return ()
        return [(b"x-kvasir-cache", header_of([(each.usage, each.misses) for each in self._served.values()]))]

    def end(self, served: ServedRequest) -> None:
        """The request has ended: what is known is remembered."""
        if self._placed is not None and self._number is not None:
            self._search(self._placed, self._number)
        self._release()
        self._served = dict(sorted(self._served.items()))
        request, memory = self._request, self._store.memory
        ended_at = served.arrived_at + served.ended_seconds
        first = request.prompts[0]
        ids = (request.request_id, request.writer.answer_id) if request.request_id else ()
        remembered = None
        if first.first_index not in self._served and served.error is not None and memory.is_on:
            remembered = memory.add(self._facts(first), None, ids, request.arrived_at)
        for known in self._served.values():
            own = ids if known.prompt is first else ()
            seen = self._seen(known, ended_at)
            made = memory.add(known.facts, seen, own, request.arrived_at, known.after)
            if made is not None:
                made.is_compared, made.across_salts = known.is_compared, self._across_salts
            if known.prompt is first:
                remembered = made
        if remembered is None:
            return
        self._tell(remembered, served.error)
        if isinstance(self._place, asyncio.Future) and not self._place.done():
            self._place.add_done_callback(lambda _: self._tell(remembered, served.error))

    def _seen(self, known: _Served, ended_at: float) -> Seen | None:
        generation, decision = known.prompt.generation, known.prompt.decision
        if decision is None:
            return None
        return Seen(
            usage=known.usage,
            model=generation.model,
            user=generation.submit.user,
            key=short_key(generation.prompt_cache_key),
            replica_id=decision.replica_id,
            ended_at=ended_at,
            epoch=None if self._index is None else self._index.epoch(decision.replica_id),
        )

    def _tell(self, remembered: RememberedPrompt, error: str | None) -> None:
        request, place = self._request, self._found_place()
        prompts = []
        for known in self._served.values():
            decision, nearest = known.prompt.decision, known.nearest
            program = known.prompt.generation.program
            made = prompt_explanation(known.facts, known.usage, decision, known.misses, nearest, program)
            found = in_tools(place, known.facts, nearest) if known is self._placed else None
            prompts.append(placed(made, found))
        explanation = Explanation(
            request.request_id,
            request.writer.answer_id,
            request.arrived_at,
            request.model.name,
            request.route,
            error,
            tuple(prompts),
            request.model.card.unit,
        )
        self._store.put(request.caller.tenant.name, remembered, explanation)

    def _found_place(self) -> Place | None:
        place = self._place
        if not isinstance(place, asyncio.Future):
            return place
        if not place.done() or place.cancelled() or place.exception():
            return None
        return place.result()


def facts_of(prompt: Prompt, caller: Caller, model: ServedModel, digests: Digests) -> PromptFacts:
    generation = prompt.generation
    submit, adapter, card = generation.submit, generation.adapter, model.card
    is_plain = not (card.is_sparse or card.peek_tokens)
    return PromptFacts(
        digests,
        tenant=caller.tenant.name,
        root=submit.root,
        namespace=NamespaceName(
            generation.model, None if adapter is None else adapter.name, generation.tenant
        ),
        block_size=card.block_size,
        packed_hashes=b"".join(generation.block_hashes),
        packed_tokens=generation.with_image_ids() if generation.media else submit.packed_tokens,
        salt_tag=generation.salt_tag,
        outline=prompt.outline or NO_OUTLINE,
        template_tag=model.template.tag,
        media=tuple((span.start, span.start + span.length) for span in submit.media),
        beginning=beginning_of(submit.packed_tokens, generation.caller.owner, generation.salt_tag),
        num_reusable_tokens=None
        if is_plain
        else num_hit_tokens(card, num_searched(card, len(generation.token_ids))),
        peek_tokens=card.peek_tokens,
    )
