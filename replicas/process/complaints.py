"""Complaints: logs each defect of others' messages once, and a bounded number in all.

Owns what has been logged. The subject of a complaint is any hashable value.
"""

import logging
from collections.abc import Hashable

MOST_COMPLAINTS = 64
"""Standing at a time. A sender that can cause one can cause many, and they must not fill the log."""


class Complaints:
    def __init__(self, logger: logging.Logger, *, most: int = MOST_COMPLAINTS) -> None:
        self._logger = logger
        self._most = most
        self._standing: set[Hashable] = set()

    def say(self, subject: Hashable, message: str) -> None:
        """Log it, unless that was said of this subject and has not been settled since."""
        if subject in self._standing or len(self._standing) > self._most:
            return
        self._standing.add(subject)
        if len(self._standing) > self._most:
            message = "more is wrong than is logged; the metrics count on"
        self._logger.error("%s", message)

    def settle(self, subject: Hashable) -> None:
        """It is right again: the next complaint about it is news."""
        self._standing.discard(subject)
