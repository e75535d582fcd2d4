"""Keyring: the API keys in force, and their callers.

Owns the parsing and comparison of a key's text: looked up by id and recognised by the hash of the whole text,
in a time that reveals neither. The source of keys is elsewhere.
"""

import hashlib
import hmac
import re

import msgspec

from router.caller import Caller
from router.errors import KeyFault

KEY_PREFIX = "sk-kvasir-"
DIGEST_BYTES = 32

_KEY = re.compile(re.escape(KEY_PREFIX) + r"([0-9a-f]{12})-[A-Za-z0-9_-]{43}", re.ASCII)
_NOBODYS_DIGEST = bytes(DIGEST_BYTES)


class HeldKey(msgspec.Struct, frozen=True, gc=False):
    """`digest` is the SHA-256 of the key's text, `expires` seconds since 1970."""

    digest: bytes
    caller: Caller
    expires: float | None = None


class Keyring:
    """Keys by their ids. Replaced as a whole when they change."""

    def __init__(self, keys: dict[str, HeldKey]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str, now: float) -> Caller | KeyFault:
        """`now` is seconds since 1970."""
        found = _KEY.fullmatch(key)
        held = self._keys.get(found.group(1)) if found is not None else None
        expected = _NOBODYS_DIGEST if held is None else held.digest
        is_right = hmac.compare_digest(key_digest(key), expected)
        if held is None or not is_right:
            return KeyFault.UNKNOWN
        if held.expires is not None and now >= held.expires:
            return KeyFault.EXPIRED
        return held.caller

    def let_go(self) -> None:
        """Free the memory piece by piece once it is unused, so that the event loop is not blocked."""
        while self._keys:
            self._keys.popitem()


def key_digest(key: str) -> bytes:
    """Return a key's stored digest. It has 256 random bits, so one round of SHA-256 is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
