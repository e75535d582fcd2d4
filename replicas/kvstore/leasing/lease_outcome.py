"""LeaseOutcome: the outcome of a request's leases, and of the earlier ones on its prompt.

Pure: the directory decides.
"""

from collections.abc import Sequence
from typing import NamedTuple

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import Directory
from replicas.kvstore.tenant_shares import NOBODYS, Tenancy
from replicas.protocol.prefix_leases import (
    LeaseAnswer,
    LeaseBreak,
    LeaseTotals,
    PrefixLease,
    nothing_kept,
)


class LeaseOutcome(NamedTuple):
    """Outcome in the form of `PromptUsage`."""

    answers: tuple[LeaseAnswer, ...] = ()
    num_evicted_early_tokens: int = 0
    broken_by: LeaseBreak | None = None
    num_expired_tokens: int = 0


NO_OUTCOME = LeaseOutcome()


def without_tiers(leases: Sequence[PrefixLease]) -> LeaseOutcome:
    return LeaseOutcome(nothing_kept(leases))


def ask_for_leases(
    directory: Directory,
    names: Sequence[ChunkName],
    leases: Sequence[PrefixLease],
    *,
    blocks_per_chunk: int,
    chunk_tokens: int,
    num_device_blocks: int,
    tenancy: Tenancy = NOBODYS,
    bucket: bytes = b"",
) -> LeaseOutcome:
    """For a prompt of these whole chunks, whose first blocks the device has. A lease covers the whole chunks
    before its end, of which there may be none.
    """
    lacking = [name.key for name in names[num_device_blocks // blocks_per_chunk :]]
    num_broken, broken_by = directory.broken(lacking)
    num_expired = directory.num_expired(lacking)
    answers: list[LeaseAnswer] = []
    for lease in leases:
        keys = [name.key for name in names[: lease.end_block // blocks_per_chunk]]
        refusal = directory.grant(keys, lease.seconds, tenancy, bucket)
        if refusal is None:
            answers.append(LeaseAnswer(lease.seconds, len(keys) * chunk_tokens))
        else:
            answers.append(LeaseAnswer(refusal=refusal))
    return LeaseOutcome(tuple(answers), num_broken * chunk_tokens, broken_by, num_expired * chunk_tokens)


def lease_totals(directory: Directory, chunk_tokens: int) -> LeaseTotals:
    counts = directory.leases.counts
    return LeaseTotals(
        num_granted=counts.granted,
        num_refused=dict(counts.refused),
        num_leased_tokens=directory.leases.num_leased * chunk_tokens,
        num_kept_tokens=counts.kept * chunk_tokens,
        num_broken_tokens={cause: number * chunk_tokens for cause, number in counts.broken.items()},
    )
