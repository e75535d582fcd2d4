"""Tokens of gRPC calls: how a caller proves membership in the cluster, and its role.

Owns a token's content and its verification. The nonce is an argument.

A token is for one call::

    <role> <nonce> <MAC(key; role, replica id, epoch, method, nonce)>       keyed BLAKE2b, 128 bits

so a stolen token is worthless at another replica, at this one after a restart, for another method, or in
another role. The replica refuses a repeated one. No clock takes part: those of two machines may differ.

It protects the *call*, and nothing that follows on the connection: an attacker who reads the network reads
prompts, and one who changes its traffic takes over open streams. Use mutual TLS against that.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from replicas.protocol.status import Epoch, ReplicaId

NONCE_BYTES = 16
MAC_BYTES = 16
MAX_TOKEN_LENGTH = 128

METADATA_KEY = "kvasir-token"


class Role(Enum):
    """The caller's role. A token carries it, and the replica decides what it allows."""

    ROUTER = "router"
    CONTROLLER = "controller"
    REPLICA = "replica"


class BadToken(Exception):
    """The token is invalid. The message says why."""


@dataclass(frozen=True, slots=True)
class Audience:
    """Whom a token is for: one incarnation of a replica."""

    replica_id: ReplicaId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Caller:
    """Makes tokens for calls to one incarnation of a replica."""

    key: bytes = field(repr=False)
    role: Role
    audience: Audience

    def token(self, method: str, nonce: bytes) -> str:
        """For one call of `method`, as gRPC names it: /package.Service/Method."""
        mac = _mac(self.key, self.role, self.audience, method, nonce)
        return f"{self.role.value} {nonce.hex()} {mac.hex()}"


@dataclass(frozen=True, slots=True)
class Proof:
    """Contents of a valid token. The nonce is in bytes, since a token can be spelled in several ways."""

    role: Role
    nonce: bytes


def proof_of(token: str, keys: Sequence[bytes], audience: Audience, method: str) -> Proof:
    """Verify the token for this call. Raises BadToken. Takes equally long for every wrong MAC."""
    try:
        if len(token) > MAX_TOKEN_LENGTH:
            raise ValueError
        name, nonce_hex, mac_hex = token.split(" ")
        role, nonce, mac = Role(name), bytes.fromhex(nonce_hex), bytes.fromhex(mac_hex)
        if len(nonce) != NONCE_BYTES:
            raise ValueError
    except ValueError:
        raise BadToken("the caller's token is malformed") from None
    for key in keys:
        if hmac.compare_digest(mac, _mac(key, role, audience, method, nonce)):
            return Proof(role, nonce)
    raise BadToken("the caller's token was made with another cluster secret, or for another replica or call")


def _mac(key: bytes, role: Role, audience: Audience, method: str, nonce: bytes) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=MAC_BYTES, person=b"kvasir-call-v1")
    for text in (role.value, audience.replica_id, audience.epoch, method):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    digest.update(nonce)
    return digest.digest()
