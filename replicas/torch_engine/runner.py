"""ModelRunner: one forward pass for a step's chunks.

Owns the way from chunks to tensors and back to one row of logits for each chunk that samples. Does
not know how tokens are chosen or which chunks come next.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from replicas.scheduling.request import Chunk
from replicas.torch_engine.attention import KVPool
from replicas.torch_engine.model import Decoder
from replicas.torch_engine.rope import rope_tables


class ModelRunner:
    """Sequences may have up to `context_length` tokens."""

    def __init__(self, model: Decoder, pool: KVPool, context_length: int) -> None:
        self._model = model
        self._pool = pool
        self._cosines, self._sines = rope_tables(
            model.config.rope, model.config.head_dim, context_length, dtype=model.dtype, device=model.device
        )

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute all `chunks`; their KV is in the pool afterwards. Each belongs to another request.

        Returns float32 logits, one row for each chunk with `samples`, in the order of `chunks`.
        """
        assert chunks
        with torch.inference_mode():
            # Rows of one token lie first and by length, so that attention takes them in slices.
            order = sorted(
                range(len(chunks)), key=lambda index: (chunks[index].num_tokens > 1, -chunks[index].start)
            )
            ordered = [chunks[index] for index in order]
            plan = self._pool.plan(ordered)
            positions = self._to_device(_positions(ordered))
            return self._model.forward(
                self._to_device(_token_ids(ordered)),
                (self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)),
                self._to_device(_logit_rows(chunks, order)),
                lambda layer, queries, keys, values: self._pool.attend(layer, queries, keys, values, plan),
            )

    def _to_device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)


def _token_ids(chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
    token_ids: list[int] = []
    for request, start, num_tokens, _ in chunks:
        if num_tokens == 1:
            token_ids.append(request.token_ids[start])
        else:
            token_ids.extend(request.token_ids[start : start + num_tokens])
    return np.array(token_ids, dtype=np.int64)


def _positions(chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
    """Positions within each sequence: a count over all rows, set back at the start of each chunk."""
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    first_rows = np.cumsum(lengths) - lengths
    positions: npt.NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(starts - first_rows, lengths)
    return positions


def _logit_rows(chunks: Sequence[Chunk], order: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the last row of each chunk that samples, in the order of `chunks`, whose rows lie in `order`."""
    last_rows = np.zeros(len(chunks), dtype=np.int64)
    row = -1
    for index in order:
        row += chunks[index].num_tokens
        last_rows[index] = row
    sampling_rows: npt.NDArray[np.int64] = last_rows[np.array([chunk.samples for chunk in chunks])]
    return sampling_rows
