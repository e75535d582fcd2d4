"""UnknownFields: counts ignored unknown fields of bodies, and logs the first names.

Owns which have been named. A name is a client's text, so it is no label of a metric, and its length and the
number in the log are bounded.
"""

import logging
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

MOST_LOGGED = 100
MOST_CHARACTERS = 60


class UnknownFields:
    """`add` takes a dialect and a number."""

    def __init__(self, add: Callable[[str, int], None]) -> None:
        self._add = add
        self._logged: set[tuple[str, str]] = set()

    def count(self, dialect: str, names: Sequence[str]) -> None:
        if not names:  # nearly always
            return
        self._add(dialect, len(names))
        for name in names:
            named = dialect, name[:MOST_CHARACTERS]
            if named not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(named)
                logger.info("a field that is not known is passed over: dialect=%s field=%r", *named)
