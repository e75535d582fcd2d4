"""Hits: where on a prompt's chain one may end, by the card, and which resume points a prompt leaves behind.

Positions are numbers of leading blocks of the card's `block_size`. Pure.

Models whose layers all attend to everything hit whatever blocks a prompt shares with earlier ones. A *sparse*
model keeps of most layers only what some positions need: the last tokens of a window, or one state. A hit may
then end at those positions alone, its *resume points*, and each replica says which it has
(`ResumePointsChanged`). How far its full attention reaches is reported apart from that, as blocks are: it is
never a hit by itself, but a request there keeps the point that later ones will resume at.
"""

from replicas.protocol.status import ModelCard


def num_searched(card: ModelCard, num_tokens: int) -> int:
    """Leading blocks of a prompt by which a hit may be found; the last token is always computed."""
    if card.is_sparse and card.peek_tokens:  # what lies behind the hit may be the prompt's end
        return num_tokens // card.block_size
    return max(0, num_tokens - 1) // card.block_size


def num_hit_tokens(card: ModelCard, num_blocks: int) -> int:
    """The hit of a prompt of which this many leading blocks were found."""
    return max(0, num_blocks * card.block_size - card.peek_tokens)


def points_left(card: ModelCard, num_tokens: int, num_shared: int = 0) -> list[int]:
    """Return the resume points that a sparse replica has after computing such a prompt, in order. Those
    within its hit may be gone since they were left.

    `num_shared` is how many of its leading blocks the replica's full attention held before, if that was more
    than the hit: a point is kept there too.
    """
    size, peek = card.block_size, card.peek_tokens
    ends = {num_tokens // size, (num_tokens - 1) // size} if peek else {(num_tokens - 1) // size}
    last = max(ends)
    if num_shared:
        ends.add(min(num_shared + peek // size, last))
    if card.retention_interval:
        ends.update(
            range((card.retention_interval + peek) // size, last + 1, card.retention_interval // size)
        )
    return sorted(end for end in ends if end > peek // size)
