"""ClusterSecret: the secret that the processes of one cluster share, and the keys made from it.

Owns the keys, one per purpose: a signature under one proves nothing under another, and the holder of one
learns nothing about the rest. Reads no file: `secret_file.py` does.
"""

import hashlib
from dataclasses import dataclass, field
from enum import Enum

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 64
KEY_BYTES = 32


class Purpose(Enum):
    """The use of a key. The values are part of the contract between versions. Namespace roots and digests of
    users and tenants come from the secret itself, under personalisations of their own."""

    LEASES = b"signatures of leases"
    CALLS = b"tokens of gRPC calls"
    CHECK = b"check value"
    CACHES = b"encryption of named caches"
    API_KEYS = b"encryption of tenants and API keys"
    EXPLANATIONS = b"encryption of explanations between routers"
    PROGRAMS = b"encryption of programs between routers"
    HISTORY = b"encryption of answers' tokens between routers"
    TENANT_TAGS = b"digests of tenants in the names of Redis' keys"


def derive(secret: bytes, purpose: Purpose) -> bytes:
    """Return the key for one purpose: keyed BLAKE2b (RFC 7693), 32 bytes. Neither the secret nor another key
    follows from it."""
    return hashlib.blake2b(
        purpose.value, key=secret, digest_size=KEY_BYTES, person=b"kvasir-derive-v1"
    ).digest()


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """`current` signs. `others` are accepted too, while a running cluster's secret changes: the next one
    before it is in force, the last one afterwards."""

    current: bytes = field(repr=False)
    others: tuple[bytes, ...] = field(default=(), repr=False)

    def key(self, purpose: Purpose) -> bytes:
        """Return the key to make something with."""
        return derive(self.current, purpose)

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Return the keys that something may have been made with, the current one first."""
        return tuple(derive(secret, purpose) for secret in (self.current, *self.others))

    @property
    def check_value(self) -> str:
        """Equal for processes with the same current secret, and public: it reveals nothing about the
        secret."""
        return self.key(Purpose.CHECK)[:8].hex()
