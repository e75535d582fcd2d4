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
    """Return the hit of a prompt of which this many leading blocks were found."""
    return max(0, num_blocks * card.block_size - card.peek_tokens)


def points_left(card: ModelCard, num_tokens: int, num_shared: int = 0) -> list[int]:
    """Return the resume points that a sparse replica has after computing such a prompt, in order. Those
    within its hit may be gone since they were left.

    `num_shared` is how many of its leading blocks the replica's full attention held before, if that was more
    than the hit: a point is kept there too. A draft model is taken to read full attention.

    A state is written where a step ends. Steps end at its blocks, at the last of them before the prompt's
    end, and at the last position there that a hit may have; retention does not make them end. Where hits are
    finer than states and windows are beside them, a point at a state's block may lack a window's first block.
    Where full attention has smaller blocks than the card's and a draft model reads them, the point of
    `num_shared` may be one block further on.
    """
    size, peek = card.block_size, card.peek_tokens
    step = max(size, card.state_tokens)
    last = num_tokens if peek else num_tokens - 1
    hits = {last // size * size - peek, last // step * step - (step if peek else 0)}
    if peek and not card.state_tokens:
        hits.add((num_tokens - 1) // size * size - peek)
    if num_shared:
        hits.add(min(num_shared * size - peek, max(hits)) // step * step)
    if card.retention_interval and not card.state_tokens:
        hits.update(range(card.retention_interval, max(hits) + 1, card.retention_interval))
    return sorted((hit + peek) // size for hit in hits if hit > 0)
