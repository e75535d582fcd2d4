"""Seal: encrypts what routers store in Redis, so that only routers can read or write it.

Owns the format: a version, a key id, a nonce, and AES-256-GCM over the rest (NIST SP 800-38D). The name of
the Redis key is authenticated with it, so a value that was moved does not open. Keys are derived from the
cluster secret; values sealed under an earlier secret open as long as that secret is accepted.
"""

import asyncio
import hashlib
import os

from replicas.protocol.cluster_secret import ClusterSecret, Purpose

VERSION = b"\x01"
KEY_ID_BYTES = 4
NONCE_BYTES = 12
TAG_BYTES = 16
OVERHEAD_BYTES = len(VERSION) + KEY_ID_BYTES + NONCE_BYTES + TAG_BYTES


class NotOurs(ValueError):
    """It has another version or secret, was moved or changed, or is not what was stored there."""


class Seal:
    """Make it in a thread: the first one loads a library."""

    def __init__(self, secret: ClusterSecret, purpose: Purpose = Purpose.CACHES) -> None:
        from cryptography.exceptions import InvalidTag  # 20 MB, only if something is sealed
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._wrong_tag = InvalidTag
        keys = secret.keys(purpose)
        self._ciphers = {_key_id(key): AESGCM(key) for key in reversed(keys)}
        self._current = _key_id(keys[0])

    def seal(self, name: str, plain: bytes) -> bytes:
        """`name` is the Redis key that the value is written to."""
        nonce = os.urandom(NONCE_BYTES)
        cipher = self._ciphers[self._current]
        return VERSION + self._current + nonce + cipher.encrypt(nonce, plain, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """Raises NotOurs."""
        key_id, rest = sealed[1 : 1 + KEY_ID_BYTES], sealed[1 + KEY_ID_BYTES :]
        cipher = self._ciphers.get(key_id)
        if len(sealed) < OVERHEAD_BYTES or sealed[:1] != VERSION or cipher is None:
            raise NotOurs("it was not sealed under this cluster's secret")
        try:
            return cipher.decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], name.encode())
        except self._wrong_tag as error:
            raise NotOurs("it was changed, or belongs elsewhere") from error


class LazySeal:
    """Makes its Seal in a thread, at the first use. For one event loop."""

    def __init__(self, secret: ClusterSecret, purpose: Purpose = Purpose.CACHES) -> None:
        self._secret, self._purpose = secret, purpose
        self._seal: Seal | None = None

    async def get(self) -> Seal:
        if self._seal is None:
            self._seal = await asyncio.to_thread(Seal, self._secret, self._purpose)
        return self._seal


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=KEY_ID_BYTES, person=b"kvasir-cacheid1").digest()
