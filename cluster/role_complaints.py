"""role_complaints(): why prompts will not be split though pools have roles.

Owns the sentences. Roles are a preference, so none of this is refused.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from cluster.config import FleetSpec, PoolSpec
from cluster.fleet_file import model_name
from replicas.protocol.status import Role

_NEEDED = {Role.PREFILL: "computes prompts for others", Role.DECODE: "decodes"}


def role_complaints(spec: FleetSpec) -> list[str]:
    """Return a sentence for each pool with a role that can do nothing with it, and for each model."""
    by_model: dict[str, list[PoolSpec]] = defaultdict(list)
    for pool in spec.pools:
        by_model[model_name(pool.replica)].append(pool)
    return [sentence for model, pools in by_model.items() for sentence in _complaints(model, pools)]


def _complaints(model: str, pools: Sequence[PoolSpec]) -> Iterator[str]:
    if all(pool.replica.role == Role.BOTH for pool in pools):
        return
    able = []
    for pool in pools:
        role, why = pool.replica.role, pool.replica.whole_because
        if why is None:
            able.append(pool)
        elif role != Role.BOTH:
            yield f"pool {pool.name} has the role {role}, but no prompt will be split there, because {why}"
    sides = {role: [each for each in able if each.replica.role in (role, Role.BOTH)] for role in _NEEDED}
    lacking = [role for role, side in sides.items() if able and not side]
    for role in lacking:
        yield f"no prompt of {model} will be split, because no pool {_NEEDED[role]}: each replica does all"
    kinds = [{_kind(pool) for pool in side} for side in sides.values()]
    if able and not lacking and kinds[0].isdisjoint(kinds[1]):
        yield (
            f"no prompt of {model} will be split, because no pool that decodes has the engine and the"
            " chunk_tokens of one that computes prompts for others"
        )


def _kind(pool: PoolSpec) -> tuple[str, int]:
    """Return what must be the same for one pool to read another's KV."""
    return pool.replica.engine, pool.replica.tokens_per_chunk
