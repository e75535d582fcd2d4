"""Explanation: why a prompt was, or was not, read from cache, as it is told and remembered.

Owns its shape. Finds nothing itself: the causes, and what is lost, are `causes.py`'s, the earlier prompt is
the memory's, the place is `places.py`'s. An explanation has ids of the own tenant's requests, counts and
positions, never text.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from replicas.protocol.frames import PromptUsage, num_cached_of
from replicas.protocol.status import Unit
from router.explain.nearest import Nearest, PromptFacts
from router.explain.places import Place, PlaceKind
from router.misses import Cause, Misses, losses
from router.programs.name import ProgramName
from router.routing.decision import Decision
from router.routing.load import ReplicaLoad

SETTINGS_PATHS = {
    "model": "model",
    "adapter": "model",
    "cache_salt": "cache_salt",
    "template_arguments": "chat_template_kwargs",
}
"""Paths in a client's body of settings that change a prompt's namespace or its template."""


Outcome = Literal["hit", "miss", "partial", "unknown"]
"""Unknown: the engine does not say what it read from its cache."""


class Earlier(msgspec.Struct, frozen=True, array_like=True):
    """The nearest earlier prompt. `num_common_tokens` is None where it has another namespace; the first token
    that differs is `diverges_at`, None where this prompt goes on from all of it."""

    ids: tuple[str, ...]
    at: float
    num_tokens: int
    num_common_tokens: int | None
    diverges_at: int | None
    changed: tuple[str, ...] = ()
    """Differences as a whole: model, cache_salt, tools, …"""


class ProgramTurn(msgspec.Struct, frozen=True, array_like=True):
    """The program that a prompt is a turn of, or a call beside its turns, and the `field` that named it. Its
    turn before ran at its `home`, where live programs need `num_beyond` tokens more than there is room for.
    """

    source: str
    field: str
    session: str
    agent: str
    is_side: bool
    num_turns: int = 0
    home: str | None = None
    num_beyond: int = 0
    waited_seconds: float = 0.0
    num_admitted: int = 0
    """Programs that had all the room while it waited."""


class SplitChoice(msgspec.Struct, frozen=True, array_like=True):
    """In a fleet with roles: whether the prompt was computed at the prefiller and decoded at the decoder, or
    all at one replica, and what each choice would have cost, in seconds."""

    is_split: bool
    prefiller: str
    decoder: str
    num_split_tokens: int
    split_seconds: float
    alone_seconds: float


class PromptExplanation(msgspec.Struct, frozen=True, array_like=True):
    """`replica_id` is where the prompt was computed."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_tier_tokens: tuple[int, int, int]
    """The part from the device, from host memory, from disk."""
    cause: str
    spans: tuple[tuple[str, int, int, str | None, float | None], ...]
    num_lost_tokens: int
    lost_ms: float | None
    replica_id: str | None
    earlier: Earlier | None = None
    path: str | None = None
    place_kind: str | None = None
    is_certain: bool = False
    sentence: str | None = None
    block_size: int = 0
    program: "ProgramTurn | None" = None
    split: SplitChoice | None = None

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.num_cached_tokens, self.cause)


class Explanation(msgspec.Struct, frozen=True, array_like=True):
    """One request's explanation. `error` names what ended it; then `prompts` may be missing."""

    request_id: str
    answer_id: str | None
    at: float
    model: str | None
    route: str
    error: str | None
    prompts: tuple[PromptExplanation, ...]
    unit: Unit = "tokens"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Explanation).decode


def packed(explanation: Explanation) -> bytes:
    return _encode(explanation)


def unpacked(data: bytes) -> Explanation:
    return _decode(data)


def prompt_explanation(
    facts: PromptFacts,
    usage: PromptUsage,
    decision: Decision | None,
    found: Misses,
    nearest: Nearest | None,
    program: ProgramName | None = None,
) -> PromptExplanation:
    lost = [(span.start, span.end) for span in found.spans if span.is_lost]
    return PromptExplanation(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_tier_tokens=(usage.num_device_tokens, usage.num_host_tokens, usage.num_disk_tokens),
        cause=found.cause.value,
        spans=tuple((s.cause.value, s.start, s.end, s.replica_id, s.at) for s in found.spans),
        num_lost_tokens=sum(end - start for start, end in lost),
        lost_ms=_lost_ms(lost, usage.num_cached_tokens, facts, decision),
        replica_id=None if decision is None else decision.computed_at,
        earlier=None if nearest is None else _earlier(facts, nearest),
        block_size=facts.block_size,
        program=None if program is None else _program(program, decision),
        split=None if decision is None else split_choice(decision, usage.num_split_tokens),
    )


def split_choice(decision: Decision, num_split_tokens: int) -> SplitChoice | None:
    """Return both choices; None in a fleet without roles."""
    pair = decision.pair
    if pair is None:
        return None
    return SplitChoice(
        pair.is_cheaper,
        pair.prefiller.replica_id,
        pair.decoder.replica_id,
        num_split_tokens,
        pair.seconds,
        pair.alone_seconds,
    )


def _program(name: ProgramName, decision: Decision | None) -> ProgramTurn:
    turn = ProgramTurn(name.source, name.field, name.session, name.agent, name.is_side)
    claim = None if decision is None else decision.claim
    if claim is None:
        return turn
    return msgspec.structs.replace(
        turn,
        num_turns=claim.num_turns,
        home=claim.home,
        num_beyond=0 if claim.home is None else claim.beyond.get(claim.home, 0),
        waited_seconds=round(claim.gate_seconds, 3),
        num_admitted=claim.num_admitted,
    )


def compared(
    explanation: PromptExplanation, facts: PromptFacts, nearest: Nearest | None
) -> PromptExplanation:
    """Add the nearest earlier prompt of one that was all read from cache, or nearly so."""
    if nearest is None:
        return explanation
    return placed(msgspec.structs.replace(explanation, earlier=_earlier(facts, nearest)), None)


def placed(explanation: PromptExplanation, place: Place | None) -> PromptExplanation:
    """With the place where it leaves the nearest earlier prompt."""
    earlier = explanation.earlier
    setting = next((SETTINGS_PATHS[name] for name in earlier.changed if name in SETTINGS_PATHS), None) if (
        earlier is not None
    ) else None  # fmt: skip
    is_words = place is not None and place.kind is not PlaceKind.TEMPLATE
    if setting is not None and not is_words:
        return msgspec.structs.replace(explanation, path=setting, place_kind="setting", is_certain=True)
    if place is None:
        if earlier is None or earlier.num_common_tokens is not None or "template" not in earlier.changed:
            return explanation
        place = Place("", PlaceKind.TEMPLATE, is_certain=True)  # another root: no token to look for
    return msgspec.structs.replace(
        explanation,
        path=place.path,
        place_kind=place.kind.value,
        is_certain=place.is_certain,
        sentence=place.sentence,
    )


def in_tools(place: Place | None, facts: PromptFacts, nearest: Nearest | None) -> Place | None:
    """Return the place: the list of tools, if leaving those out is all that changed."""
    if place is None or nearest is None or facts.outline.tools or changes(facts, nearest) != ["tools"]:
        return place
    return Place("tools", PlaceKind.VALUE, is_certain=True)


def header_of(prompts: Sequence[tuple[PromptUsage, Misses]]) -> bytes:
    """Write `x-kvasir-cache` for a request's prompts. The cause is the one that lost most; if there are
    several, each follows with its tokens."""
    lost = losses(span for _, found in prompts for span in found.spans)
    num_cached = num_cached_of(usage for usage, _ in prompts)
    if num_cached is None:
        return b"unknown; cause=" + Cause.NOT_REPORTED.encode()
    outcomes = {outcome_of(usage.num_cached_tokens, found.cause) for usage, found in prompts}
    outcome = outcomes.pop() if len(outcomes) == 1 else "partial"
    missed = (found.cause for _, found in prompts if found.cause is not Cause.HIT)
    cause = next(iter(lost), None) or next(missed, Cause.HIT)
    parts = "".join(f"; {name}={num_tokens}" for name, num_tokens in lost.items()) if len(lost) > 1 else ""
    return f"{outcome}; cached={num_cached}; lost={sum(lost.values())}; cause={cause}{parts}".encode()


def outcome_of(num_cached_tokens: int | None, cause: str) -> Outcome:
    if num_cached_tokens is None:
        return "unknown"
    if not num_cached_tokens:
        return "miss"
    return "hit" if cause == Cause.HIT else "partial"


def _earlier(facts: PromptFacts, nearest: Nearest) -> Earlier:
    prompt = nearest.prompt
    return Earlier(
        prompt.ids if prompt.salt_tag == facts.salt_tag else (),
        prompt.at,
        prompt.num_tokens,
        nearest.num_common_tokens,
        nearest.diverges_at,
        tuple(changes(facts, nearest)),
    )


def changes(facts: PromptFacts, nearest: Nearest) -> list[str]:
    """List what differs in the request as a whole from the earlier one, in prompt order."""
    earlier, outline, before = nearest.prompt, facts.outline, nearest.prompt.outline
    found = []
    if facts.namespace.model != earlier.model:
        found.append("model")
    if facts.namespace.adapter != earlier.adapter:
        found.append("adapter")
    if facts.salt_tag != earlier.salt_tag:
        found.append("cache_salt")
    if outline.arguments != before.arguments:
        found.append("template_arguments")
    if outline.tools != before.tools:
        found.append("tools")
    elif outline.written_tools != before.written_tools:
        found.append("tool_keys")
    if outline.system != before.system:
        found.append("system")
    if nearest.goes_on and not outline.messages.startswith(before.messages):
        found.append("messages")
    if outline.output_format != before.output_format:
        found.append("output_format")
    if facts.template_tag != earlier.template_tag:
        found.append("template")
    if not found and (nearest.num_common_tokens is None or nearest.goes_on):
        found.append("model_version" if nearest.num_common_tokens is None else "template")
    return found


def _lost_ms(
    lost: Sequence[tuple[int, int]], num_cached: int | None, facts: PromptFacts, decision: Decision | None
) -> float | None:
    """At the pace that the replica which computed the prompt has measured: for the tokens, and for images
    that nothing else would have had it encode."""
    load = None if decision is None else _load_of_chosen(decision.of_prompt())
    if load is None or not load.prefill_seconds_per_token or num_cached is None:
        return None
    if not lost:
        return 0.0
    num_lost = sum(end - start for start, end in lost)
    seconds = num_lost * load.prefill_seconds_per_token
    if load.encode_seconds_per_token:
        seconds += _num_encoded_again(lost, num_cached, facts) * load.encode_seconds_per_token
    return round(seconds * 1e3, 3)


def _num_encoded_again(lost: Sequence[tuple[int, int]], num_cached: int, facts: PromptFacts) -> int:
    """Tokens of the images of which all that was computed is lost: an image is encoded as a whole, and with
    any of its tokens."""
    num_tokens = 0
    for start, end in facts.media:
        num_computed = end - max(start, num_cached)
        num_lost = sum(max(0, min(end, until) - max(start, since)) for since, until in lost)
        if num_lost and num_lost >= num_computed:
            num_tokens += end - start
    return num_tokens


def _load_of_chosen(decision: Decision) -> ReplicaLoad | None:
    for candidate in decision.candidates:
        if candidate.replica_id == decision.replica_id:
            return candidate.load
    return None
