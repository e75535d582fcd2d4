"""DiskHealth: whether writes are allowed now, and the log lines about it.

Owns the pause after a failed write, and the reserve of free space. Pure: the caller supplies the time. Each
problem is logged once, and again when it is over.
"""

import logging

from replicas.kvstore.on_disk.breaker import Breaker
from replicas.kvstore.on_disk.disk_options import DiskOptions
from replicas.protocol.tier_figures import WriteStop

logger = logging.getLogger(__name__)


class DiskHealth:
    def __init__(self, options: DiskOptions) -> None:
        self._folder = options.folder
        self._reserve_bytes = options.reserve_bytes
        self._slot_bytes = options.slot_bytes
        self._breaker = Breaker()
        self._free_bytes = options.reserve_bytes + options.slot_bytes
        self._is_full = False
        self._has_failed_to_remove = False

    def allows(self, now: float) -> bool:
        return self._breaker.allows(now) and not self._is_full

    @property
    def write_stop(self) -> WriteStop | None:
        """Why writing has stopped, or None."""
        if self._is_full:
            return WriteStop.FULL
        return WriteStop.FAILS if self._breaker.is_tripped else None

    def has_free(self, num_bytes: int) -> None:
        """Record the file system's free bytes."""
        self._free_bytes = num_bytes
        is_full = num_bytes - self._reserve_bytes < self._slot_bytes
        if is_full and not self._is_full:
            logger.warning(
                "%s has less free space than a file and the reserve of %d bytes need; nothing is written"
                " until there is more",
                self._folder,
                self._reserve_bytes,
            )
        elif self._is_full and not is_full:
            logger.warning("%s has free space again", self._folder)
        self._is_full = is_full

    def has_written(self, num_bytes: int) -> None:
        if self._breaker.is_tripped:
            logger.warning("%s can be written to again", self._folder)
        self._breaker.succeeded()
        self.has_free(self._free_bytes - num_bytes)

    def has_failed_to_write(self, now: float, error: OSError) -> None:
        was_tripped = self._breaker.is_tripped
        seconds = self._breaker.failed(now)
        if not was_tripped:
            logger.error(
                "cannot write to %s (%s); what is there is read, and writing is tried again after %g seconds,"
                " then less and less often",
                self._folder,
                error.strerror,
                seconds,
            )

    def has_failed_to_remove(self, error: OSError) -> None:
        """Log a failed removal once; the file's bytes count until a retry succeeds."""
        if not self._has_failed_to_remove:
            logger.error("a file in %s cannot be removed: %s", self._folder, error.strerror)
        self._has_failed_to_remove = True
