"""CacheRecord: the metadata of one named cache, and CacheContent: the beginning that it stands for.

Owns when a cache is gone, and the message that says so. A record outlives its content to say why it is gone.
"""

import enum
import re
from datetime import UTC, datetime

from msgspec import Struct

from router.features.named_caches.bounds import GONE_SECONDS

ID_PREFIX = "cache_"
_ID = re.compile(r"cache_[0-9a-f]{32}")


class CacheKind(enum.StrEnum):
    """The kind of request that can begin with the cache."""

    CHAT = "chat"
    COMPLETION = "completion"
    GEMINI = "gemini"


class CacheLease(Struct, frozen=True):
    """The replica's last answer to the request to keep the beginning's KV. `refused` is why it did not."""

    seconds: int = 0
    num_tokens: int = 0
    refused: str | None = None


class CacheRecord(Struct, frozen=True, kw_only=True):
    """Times are in seconds since 1970. `num_bytes` is the content's size as it was sent, `num_tokens` the
    length of the beginning alone. `salt` is the cache salt that its KV is kept under. `deleted` is the time
    of deletion.
    """

    cache_id: str
    tenant: str
    model: str
    kind: CacheKind
    created: float
    expires: float
    ttl: int
    num_bytes: int
    num_tokens: int
    name: str | None = None
    salt: str | None = None
    lease: CacheLease | None = None
    deleted: float | None = None

    def seconds_left(self, now: float) -> float:
        """Until it expires; 0 if it is gone. At most its TTL, even by a clock behind that of its router."""
        return 0.0 if self.deleted is not None else min(float(self.ttl), max(0.0, self.expires - now))

    def is_gone(self, now: float) -> bool:
        return self.seconds_left(now) <= 0

    def known_seconds(self, now: float) -> float:
        """How long the record is to outlive `now`."""
        end = self.expires if self.deleted is None else self.deleted
        return end + GONE_SECONDS - now


class CacheContent(Struct, frozen=True):
    """JSON as the client sent it: `beginning` is messages, a text, token ids, or an object of the fields that
    Gemini's requests begin with; `tools` is a list, or empty."""

    beginning: bytes
    tools: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.beginning) + len(self.tools)


class Gone(enum.StrEnum):
    """Reason why there is no cache of that id."""

    NOT_FOUND = "not_found"
    """It never existed, belongs to another tenant, or went long ago."""
    EXPIRED = "expired"
    DELETED = "deleted"
    LOST = "lost"
    """Its content is missing or does not open."""


def is_cache_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def gone_words(cache_id: str, record: CacheRecord | None, now: float) -> tuple[Gone, str]:
    """Return the reason and its message. If the record is not gone, its content was lost."""
    shown = cache_id[:60]
    if record is None:
        return Gone.NOT_FOUND, f"There is no cache '{shown}'."
    if record.deleted is not None:
        return Gone.DELETED, f"The cache '{shown}' was deleted at {moment(record.deleted)}."
    if record.is_gone(now):
        return Gone.EXPIRED, (
            f"The cache '{shown}' expired at {moment(record.expires)}, {record.ttl} s after it was created or"
            " extended."
        )
    return Gone.LOST, f"The beginning that the cache '{shown}' stood for was lost. Create it again."


def moment(seconds: float) -> str:
    """In UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
