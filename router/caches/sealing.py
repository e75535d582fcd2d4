"""CacheSeal: what routers keep in Redis of named caches and the like, which only routers can read or make.

Owns the form: a version, which key, a nonce, and AES-256-GCM over the rest (NIST SP 800-38D), which is bound
to the key's name in Redis, so that nothing passes for something else. The keys are made of the cluster
secret; what was sealed under one of its other values is still opened while that is accepted.
"""

import hashlib
import os

from replicas.protocol.cluster_secret import ClusterSecret, Purpose

VERSION = b"\x01"
KEY_ID_BYTES = 4
NONCE_BYTES = 12
TAG_BYTES = 16
OVERHEAD_BYTES = len(VERSION) + KEY_ID_BYTES + NONCE_BYTES + TAG_BYTES


class NotOurs(ValueError):
    """Of another version, under another secret, moved from elsewhere, or changed."""


class CacheSeal:
    """To be made in a thread: the first one loads a library."""

    def __init__(self, secret: ClusterSecret, purpose: Purpose = Purpose.CACHES) -> None:
        from cryptography.exceptions import InvalidTag  # 20 MB, for those alone who use named caches
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._wrong_tag = InvalidTag
        keys = secret.keys(purpose)
        self._ciphers = {_key_id(key): AESGCM(key) for key in reversed(keys)}
        self._current = _key_id(keys[0])

    def seal(self, name: str, plain: bytes) -> bytes:
        """`name` is where it is to lie."""
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


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=KEY_ID_BYTES, person=b"kvasir-cacheid1").digest()
