"""Preview: what the router would decide for a prompt now, and why, as plain data.

Owns the shape that the explain route answers with. Decides nothing itself: it writes out a decision that
the router's own code has made.
"""

from collections.abc import Mapping
from typing import Any

from replicas.protocol.hits import num_hit_tokens, num_searched
from replicas.protocol.keys import blocks_per_stride, indexed_positions
from replicas.protocol.status import ModelCard
from replicas.protocol.ways import moves
from router.generation import Generation
from router.routing.decision import Candidate, Decision, DecisionReason
from router.routing.table import Preview

_BECAUSE: Mapping[DecisionReason, str] = {
    DecisionReason.ONLY_REPLICA: "no other replica is ready",
    DecisionReason.OVERLAP: "no other replica holds more of the prompt",
    DecisionReason.HOME: "it is the first of the bucket's affinity order",
    DecisionReason.SPILL: "it costs less than its home and than those with more of the prompt",
    DecisionReason.SPLIT: "another replica computes the prompt, since no replica does both for less",
    DecisionReason.POLICY: "a baseline policy chose it",
}

_TERMS: Mapping[str, str] = {
    "wait_seconds": "its queue is longer",
    "move_seconds": "bringing KV to its device takes longer",
    "prefill_seconds": "it computes more slowly",
    "delay_seconds": "the prompt delays more requests",
    "room_seconds": "its cache is fuller, so room costs more",
    "future_seconds": "live programs will need more than it has room for",
}
"""Why a replica costs more than the chosen one, by the term of its cost."""

_LESS_IN_LAYERS = "it has less of the prompt in some layers"


def preview_data(
    generation: Generation, preview: Preview, *, card: ModelCard, index_stride: int
) -> dict[str, Any]:
    """`affinity_order` begins with home; `block_hashes` are those that the index keeps, as hex. The points
    where a hit may end are None for a model that is not sparse."""
    decision = preview.decision
    block_hashes, block_size = generation.block_hashes, card.block_size
    positions = indexed_positions(len(block_hashes), blocks_per_stride(block_size, index_stride))
    return {
        "model": generation.model,
        "adapter": None if generation.adapter is None else generation.adapter.name,
        "num_tokens": len(generation.token_ids),
        "unit": card.unit,
        "block_size": block_size,
        "bucket": generation.bucket.hex(),
        "affinity_order": list(preview.affinity_order),
        "decision": {
            "replica": decision.replica_id,
            "reason": decision.reason.value,
            "because": because(decision),
            "overlap_tokens": decision.overlap_tokens,
        },
        "candidates": candidates_by_cost(decision, block_size),
        "split": pair_data(decision),
        "block_hashes": [
            {"num_tokens": (position + 1) * block_size, "hash": block_hashes[position].hex()}
            for position in positions
        ],
        "resume_points": _resume_points(generation, card) if card.is_sparse else None,
    }


def _resume_points(generation: Generation, card: ModelCard) -> list[dict[str, Any]]:
    num_blocks = num_searched(card, len(generation.token_ids))
    return [
        {"num_tokens": num_hit_tokens(card, end), "hash": block_hash.hex()}
        for end, block_hash in enumerate(generation.block_hashes[:num_blocks], 1)
        if num_hit_tokens(card, end)
    ]


def because(decision: Decision) -> str:
    """Why it goes there. Of a spill: what decided against the one with most of the prompt, or the home."""
    if decision.reason is not DecisionReason.SPILL:
        return _BECAUSE[decision.reason]
    chosen = next((each for each in decision.candidates if each.replica_id == decision.replica_id), None)
    if chosen is None:
        return _BECAUSE[decision.reason]
    others = [each for each in decision.candidates if each is not chosen]
    passed = min(others, key=lambda each: (-each.overlap_tokens, each.rank))
    role = "its home" if passed.overlap_tokens <= chosen.overlap_tokens else "which has more of the prompt"
    has_less = passed.num_reached_blocks < chosen.num_reached_blocks
    if passed.cost.seconds <= chosen.cost.seconds:
        why = _LESS_IN_LAYERS if has_less else "it has more requests"
        return f"not to {passed.replica_id}, {role}: {why}, and costs about as much"
    own, other = chosen.cost, passed.cost
    term = max(_TERMS, key=lambda name: getattr(other, name) - getattr(own, name))
    why = _LESS_IN_LAYERS if has_less and term == "room_seconds" else _TERMS[term]
    here, there = (_milliseconds(getattr(cost, term)) for cost in (own, other))
    return f"not to {passed.replica_id}, {role}: {why} ({there}, {here} at {chosen.replica_id})"


def pair_data(decision: Decision) -> dict[str, Any] | None:
    """Return the cheapest split and what it was compared with; None in a fleet without roles."""
    pair = decision.pair
    if pair is None:
        return None
    return {
        "is_split": pair.is_cheaper,
        "prefiller": pair.prefiller.replica_id,
        "decoder": pair.decoder.replica_id,
        "split_tokens": pair.num_lacking_tokens,
        "split_ms": round(1e3 * pair.seconds, 3),
        "alone_ms": round(1e3 * pair.alone_seconds, 3),
    }


def candidates_by_cost(decision: Decision, block_size: int) -> list[dict[str, Any]]:
    """Return the cheapest first."""
    by_cost = sorted(decision.candidates, key=lambda candidate: (candidate.cost.seconds, candidate.rank))
    return [_candidate(candidate, block_size) for candidate in by_cost]


def _candidate(candidate: Candidate, block_size: int) -> dict[str, Any]:
    """Write out a candidate. `reached_tokens` are what full attention has of a sparse model, else 0."""
    return {
        "replica": candidate.replica_id,
        "rank": candidate.rank,
        "overlap_tokens": candidate.overlap_tokens,
        "reached_tokens": candidate.num_reached_blocks * block_size,
        "num_requests": candidate.load.num_requests,
        "num_pending_tokens": candidate.load.num_pending_tokens,
        "num_pending_image_tokens": candidate.load.num_pending_image_tokens,
        "wait_seconds": candidate.cost.wait_seconds,
        "move_seconds": candidate.cost.move_seconds,
        "prefill_seconds": candidate.cost.prefill_seconds,
        "encode_seconds": candidate.cost.encode_seconds,
        "delay_seconds": candidate.cost.delay_seconds,
        "room_seconds": candidate.cost.room_seconds,
        "future_seconds": candidate.cost.future_seconds,
        "cost_seconds": candidate.cost.seconds,
        "tiers": _tiers(candidate),
        "is_predicted": candidate.load.is_predicted,
    }


def _tiers(candidate: Candidate) -> dict[str, Any] | None:
    """How deep each tier reaches, those that are faster included, and what becomes of what lies below the
    device. None for a replica that does not say what moving takes: all that it has counts as it stands.
    """
    if candidate.load.speeds.host is None:
        return None
    reach, cost = candidate.reach, candidate.cost
    load_seconds = dict(moves(reach, candidate.load.speeds)).get(reach.local)
    return {
        "device_tokens": reach.device,
        "host_tokens": reach.host,
        "disk_tokens": reach.local,
        "load_seconds": load_seconds,
        "compute_seconds": (reach.local - reach.device) * cost.token_seconds,
        "sentence": None if reach.local == reach.device else _sentence(candidate, load_seconds),
    }


def _sentence(candidate: Candidate, load_seconds: float | None) -> str:
    """Say where the deepest copy lies, how long each way takes, and which is taken if not the first."""
    reach, cost = candidate.reach, candidate.cost
    place = "on disk" if reach.local > reach.host else "in host memory"
    compute_seconds = (reach.local - reach.device) * cost.token_seconds
    load = "not known how long to load" if load_seconds is None else f"{_milliseconds(load_seconds)} to load"
    text = f"{place} at {candidate.replica_id}, {load}, {_milliseconds(compute_seconds)} to compute"
    num_moved = min(cost.num_ready_tokens, reach.local) - reach.device
    if num_moved <= 0:
        return f"{text}: it would be computed"
    num_left = reach.local - reach.device - num_moved
    return f"{text}: {num_left:,} tokens of it would be computed" if num_left else text


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
