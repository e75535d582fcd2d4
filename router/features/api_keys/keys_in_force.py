"""KeysInForce: the newest valid keys, whatever happened to their source since.

Owns the log lines when newer ones are refused or the source is away, once each, and the age of the keys in
force. The source's reader passes on what it finds, between two requests.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.caller import Caller
from router.errors import KeyFault
from router.features.api_keys.key_record import KeyDocument, keyring_of
from router.features.api_keys.keyring import Keyring
from router.shared.instruments import Instrument, counter, gauge

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeySet:
    """Made of a document beside the event loop, since that takes a while for many keys."""

    keyring: Keyring
    num_tenants: int


def key_set(document: KeyDocument) -> KeySet:
    return KeySet(keyring_of(document), len(document.tenants))


class KeysInForce:
    """For one event loop. Before the first `put` no request is admitted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._set = KeySet(Keyring({}), 0)
        self._seen_at = clock()
        self._complaint: str | None = None
        self.is_newest_refused = False
        self.num_changes = 0

    def find(self, key: str, now: float) -> Caller | KeyFault:
        """`now` is seconds since 1970."""
        return self._set.keyring.find(key, now)

    def put(self, new: KeySet) -> KeySet:
        """From now on these count. Returns those before them, to be let go beside the event loop."""
        old, self._set = self._set, new
        self.num_changes += 1
        self.confirm()
        return old

    def confirm(self) -> None:
        """Confirm that the keys in force are the newest."""
        if self._complaint is not None:
            logger.info("the source of the keys is right again")
        self._complaint, self.is_newest_refused = None, False
        self._seen_at = self._clock()

    def refuse(self, complaint: str) -> None:
        """The newest keys are wrong; the ones before them stay in force."""
        self.is_newest_refused = True
        self._say(complaint)

    def miss(self, complaint: str) -> None:
        """Record that the newest keys cannot be read; known keys stay in force."""
        self._say(complaint)

    @property
    def num_keys(self) -> int:
        return len(self._set.keyring)

    @property
    def num_tenants(self) -> int:
        return self._set.num_tenants

    @property
    def age_seconds(self) -> float:
        """Since the keys in force were last seen to be the newest."""
        return self._clock() - self._seen_at

    def instruments(self) -> Iterator[Instrument]:
        yield gauge("router_keys", "API keys in force", lambda: self.num_keys)
        yield gauge("router_key_tenants", "Tenants of the API keys in force", lambda: self.num_tenants)
        yield gauge(
            "router_keys_age_seconds",
            "Time since the API keys in force were last seen to be the newest: it grows while their file or "
            "Redis cannot be read, and while what is there is wrong",
            lambda: self.age_seconds,
        )
        yield gauge(
            "router_keys_refused",
            "1 while the newest API keys are wrong and older ones in force, else 0",
            lambda: self.is_newest_refused,
        )
        yield counter(
            "router_key_changes_total",
            "Times that API keys were read anew",
            lambda: self.num_changes,
        )

    def _say(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            num_keys = len(self._set.keyring)
            then = "those before stay in force" if num_keys else "no request is admitted"
            logger.error("%s; %s keys=%d", complaint, then, num_keys)
