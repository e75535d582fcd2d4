"""complaint(): why the attention kernel cannot be used on this machine, if so.

Asked before a replica serves, so that no request waits for a compiler or gets a wrong kernel's answer. The
oracle is the gathering attention.
"""

import logging
from collections.abc import Iterator, Sequence

import torch

from replicas.torch_engine.kernel_attention import SINGLES
from replicas.torch_engine.rows import CachedAttention, KVBlocks, Rows

logger = logging.getLogger(__name__)
_MOST_BLOCKS = 24
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Between outputs for numbers that are drawn from a normal distribution, so few of them are above 3."""


def complaint(kernel: CachedAttention, gathered: CachedAttention, blocks: KVBlocks) -> str | None:
    """Return one sentence, or None. Afterwards every kernel is compiled, and the blocks are zero, as
    before."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = min(_MOST_BLOCKS, blocks.num_blocks - 1)
    block_ids = (torch.randperm(blocks.num_blocks - 1, generator=generator)[:num_blocks] + 1).tolist()
    with torch.inference_mode():
        for store in blocks.tensor[:, 0]:
            drawn = torch.randn((num_blocks, store.shape[1]), generator=generator)
            store[block_ids] = drawn.to(store.device, store.dtype)
        try:
            for rows in _batches(block_ids, blocks.block_size, generator):
                difference = _difference(kernel, gathered, blocks, rows, generator)
                if not difference <= _TOLERANCES[blocks.dtype]:  # a NaN is no answer either
                    return f"its outputs differ from those of the gather by {difference:.2g}"
        except Exception as error:  # compilers, drivers and cards have errors of their own
            logger.debug("the attention kernel fails", exc_info=True)
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        finally:
            blocks.tensor[:, 0, block_ids] = 0.0
    return None


def _batches(block_ids: list[int], block_size: int, generator: torch.Generator) -> Iterator[list[Rows]]:
    """Yield a batch per kernel. All sequences have the same blocks, as if they shared a prefix."""
    num_tokens = len(block_ids) * block_size

    for size in SINGLES:
        starts = torch.randint(num_tokens, (size,), generator=generator).sort(descending=True).values
        yield [Rows(row, start, 1, block_ids) for row, start in enumerate(starts.tolist())]


def _difference(
    kernel: CachedAttention,
    gathered: CachedAttention,
    blocks: KVBlocks,
    rows: Sequence[Rows],
    generator: torch.Generator,
) -> float:
    """Return the largest between two outputs."""
    num_tokens = rows[-1].first + rows[-1].num_tokens
    drawn = torch.randn((num_tokens, blocks.num_heads, blocks.head_dim), generator=generator)
    queries = drawn.to(blocks.device, blocks.dtype)
    answers = []
    for attention in (kernel, gathered):
        outputs = torch.zeros_like(queries)
        attention.plan(rows)(0, queries, outputs)
        answers.append(outputs.float())
    return float((answers[0] - answers[1]).abs().max())
