"""ChainHasher: block hashes of prompts, looked up where an earlier prompt began alike.

Owns its cache, bounded in bytes, LRU. Knows no model and no namespace: its answers equal those of
`hash_blocks`, and never depend on what it has seen.

A chain is cut into runs of blocks, and a run's hashes are found by a digest of their inputs::

    block   0 .. 15                 16 .. 31                                32 .. 47    48 .. 52
    key     SHA-256(root | tokens)  SHA-256(root | hash of 15 | tokens)     ...         too short: hashed

Equal digests mean equal parents, equal tokens and equal media, even under attack; and since the namespace's
root is in each, no request finds another namespace's entries.

Only the first run of an unknown chain is stored. Each time it returns, as much again as was known is stored,
and one more: a shared prefix is stored whole after a few prompts, while a prompt that never returns costs one
digest and one entry.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from replicas.protocol.blocks import BlockHash, ImageTokens, hash_packed, media_within
from router.shared.instruments import Instrument, counter, gauge

DEFAULT_CACHE_BYTES = 32 * 2**20

BLOCKS_PER_RUN = 16
BYTES_PER_RUN = 1440
"""16 hashes of 64 bytes each, their tuple, the key and a place in the dictionary."""


class ChainHasher:
    """One thread may use it."""

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._max_runs = max_bytes // BYTES_PER_RUN
        self._runs: OrderedDict[bytes, tuple[BlockHash, ...]] = OrderedDict()
        self.num_hits = 0
        self.num_misses = 0

    def hash_packed(
        self,
        root: BlockHash,
        packed: bytes,
        block_size: int,
        *,
        parent: BlockHash | None = None,
        start: int = 0,
        media: Sequence[ImageTokens] = (),
    ) -> list[BlockHash]:
        """Hash a prompt as `hash_packed` of `blocks.py` does, or its part after `parent`, which begins at
        token `start`."""
        run_tokens = BLOCKS_PER_RUN * block_size
        run_bytes = run_tokens * 4
        num_full_runs = len(packed) // run_bytes

        def key(run: int, before: bytes) -> bytes:
            inputs = before + packed[run * run_bytes : (run + 1) * run_bytes]
            if media:
                run_start = start + run * run_tokens
                inputs += media_within(media, run_start, run_start + run_tokens)
            return hashlib.sha256(inputs).digest()

        hashes: list[BlockHash] = []
        keys: list[bytes] = []
        first = before = root if parent is None else root + parent
        for run in range(num_full_runs):
            known = self._runs.get(one := key(run, before))
            if known is None:
                break
            keys.append(one)
            hashes += known
            parent = known[-1]
            before = root + parent
        num_known = len(keys)
        rest, rest_start = packed[num_known * run_bytes :], start + num_known * run_tokens
        hashes += hash_packed(root, rest, block_size, parent=parent, start=rest_start, media=media)
        self.num_hits += num_known * BLOCKS_PER_RUN
        self.num_misses += len(hashes) - num_known * BLOCKS_PER_RUN
        keys += [
            key(run, root + hashes[run * BLOCKS_PER_RUN - 1] if run else first)
            for run in range(num_known, min(num_full_runs, 2 * num_known + 1))
        ]
        self._remember(keys, num_known, hashes)
        return hashes

    @property
    def num_bytes(self) -> int:
        return len(self._runs) * BYTES_PER_RUN

    def instruments(self) -> Iterator[Instrument]:
        """Hits and misses count blocks. Those in runs that are not full are always misses."""
        yield gauge(
            "router_hash_cache_bytes",
            "Memory of block hashes of earlier prompts",
            lambda: self.num_bytes,
        )
        yield counter(
            "router_hash_cache_hits_total",
            "Prompt blocks whose hash was found in the cache of hashes",
            lambda: self.num_hits,
        )
        yield counter(
            "router_hash_cache_misses_total",
            "Prompt blocks that had to be hashed",
            lambda: self.num_misses,
        )

    def _remember(self, keys: Sequence[bytes], num_known: int, hashes: Sequence[BlockHash]) -> None:
        """Store the keys' runs, the first of which are known. The last is used first, so that it is evicted
        first: without its beginning a chain is not found."""
        runs = self._runs
        for run in range(len(keys) - 1, num_known - 1, -1):
            runs[keys[run]] = tuple(hashes[run * BLOCKS_PER_RUN : (run + 1) * BLOCKS_PER_RUN])
        for key in reversed(keys[:num_known]):
            runs.move_to_end(key)
        while len(runs) > self._max_runs:
            runs.popitem(last=False)
