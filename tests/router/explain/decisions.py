"""Decisions to explain: replicas with so many tokens, the first of which was chosen."""

from collections.abc import Collection, Mapping

from replicas.protocol.status import ReplicaId
from replicas.protocol.ways import NO_MOVES, MoveSpeeds, Reach
from router.routing.cost import Cost
from router.routing.decision import Candidate, Decision, DecisionReason
from router.routing.levels import Depth, Holdings, Slots
from router.routing.load import ReplicaLoad

BLOCK_SIZE = 16


def decision(
    promised: Mapping[str, int] | None = None,
    gone: Collection[str] = (),
    speeds: MoveSpeeds = NO_MOVES,
    pull_from: str | None = None,
    *,
    is_predicted: bool = False,
    **stored: int,
) -> Decision:
    """`promised` is what the index foretold of each, if it is more than it has stored; `gone` are no
    candidates."""
    deep = {name: max(num, (promised or {}).get(name, 0)) for name, num in stored.items()}
    candidates = tuple(
        Candidate(
            ReplicaId(name),
            rank,
            num,
            ReplicaLoad(3, 500, speeds=speeds, is_predicted=is_predicted),
            Cost(0.01, 0.02, 0.0, 0.0),
            Reach(num, num, num, num),
        )
        for rank, (name, num) in enumerate(deep.items())
        if name not in gone
    )
    slots = Slots({ReplicaId(name): 8**number for number, name in enumerate(deep)})
    return Decision(
        candidates[0].replica_id,
        candidates[0].overlap_tokens,
        DecisionReason.HOME,
        0,
        candidates,
        None if pull_from is None else ReplicaId(pull_from),
        Holdings(slots, _levels(slots, deep), _levels(slots, stored), frozenset(map(ReplicaId, gone))),
    )


def _levels(slots: Slots, tokens: Mapping[str, int]) -> list[Depth]:
    depths = {name: num // BLOCK_SIZE for name, num in tokens.items()}
    return [
        (depth, slots.mask(ReplicaId(name) for name in depths if depths[name] == depth))
        for depth in sorted(set(depths.values()), reverse=True)
        if depth
    ]
