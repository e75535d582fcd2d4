"""CacheBounds: how many named caches there may be, and how large.

Plain data.
"""

from dataclasses import dataclass, replace

MAX_TTL_SECONDS = 86_400
DEFAULT_TTL_SECONDS = 3600
GONE_SECONDS = 86_400
"""Seconds that a record outlives its cache, to say when and why it went."""
MAX_NAME_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """`num_caches` and `num_bytes` bound the caches that have not expired, over all routers;
    `bytes_per_cache` bounds one beginning as it was sent; `memory_bytes` bounds each router's memory."""

    num_caches: int = 1024
    bytes_per_cache: int = 2**20
    num_bytes: int = 64 * 2**20
    memory_bytes: int = 32 * 2**20

    def of_share(self, share: float) -> "CacheBounds":
        """Return the bounds of one tenant: at least one cache."""
        return replace(
            self,
            num_caches=max(1, int(self.num_caches * share)),
            num_bytes=max(min(self.bytes_per_cache, self.num_bytes), int(self.num_bytes * share)),
        )
