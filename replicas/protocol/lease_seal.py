"""LeaseSeal: signs and checks the leases of replicas, with a key made of the cluster secret.

The MAC covers every field that readers believe and the key's name in Redis, so a lease cannot pass for
another replica's or another model's. A reader with a secret skips leases that are unsigned, forged, signed
with another secret (a published check value tells this from a forgery), or older than one heard lately.
Without a secret on either side, both say so at start and go on.

No clock decides: a counter in Redis numbers incarnations as they register, and each counts its heartbeats.
A replica that finds another epoch in its own lease gives way only to a signed one with a higher number.

A writer to Redis who cannot sign can still delete leases, copy back a dead replica's last one (routers then
find no replica, or another, at its address), and write wrong changes and sets into the index, which costs
cache hits. After Redis has lost everything, an incarnation that registers before a living one has written
its number again may count as older than it is.
"""

import hashlib
import hmac
from collections.abc import Mapping

from replicas.protocol.cluster_secret import ClusterSecret, Purpose

SIGNATURE_BYTES = 16
CHECK_FIELD, SIGNATURE_FIELD = "check", "signature"


class LeaseRefused(ValueError):
    """A lease that must not be believed. `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


MALFORMED, UNSIGNED, OTHER_SECRET, FORGED, OLD = "malformed", "unsigned", "other_secret", "forged", "old"
REASONS = (MALFORMED, UNSIGNED, OTHER_SECRET, FORGED, OLD)


class LeaseSeal:
    def __init__(self, secret: ClusterSecret) -> None:
        self._keys = secret.keys(Purpose.LEASES)
        self._check_value = secret.check_value
        self._known_check_values = frozenset(
            ClusterSecret(each).check_value for each in (secret.current, *secret.others)
        )

    def signed(self, key_name: str, fields: Mapping[str, str]) -> dict[str, str]:
        """Return the same fields, and two more."""
        checked = {**fields, CHECK_FIELD: self._check_value}
        encoded = {name.encode(): value.encode() for name, value in checked.items()}
        return {**checked, SIGNATURE_FIELD: _signature(self._keys[0], key_name, encoded)}

    def check(self, key_name: str, fields: Mapping[bytes, bytes]) -> None:
        """Raises LeaseRefused."""
        signature = fields.get(SIGNATURE_FIELD.encode())
        check_value = fields.get(CHECK_FIELD.encode(), b"").decode("ascii", "replace")
        if signature is None:
            raise LeaseRefused(UNSIGNED, "its lease is not signed: it was started without the cluster secret")
        if check_value not in self._known_check_values:
            raise LeaseRefused(OTHER_SECRET, "its lease is signed with another cluster secret than ours")
        signed = {name: value for name, value in fields.items() if name != SIGNATURE_FIELD.encode()}
        expected = [_signature(key, key_name, signed).encode() for key in self._keys]
        if not any(hmac.compare_digest(each, signature) for each in expected):
            raise LeaseRefused(FORGED, "its lease has a wrong signature")


def _signature(key: bytes, key_name: str, fields: Mapping[bytes, bytes]) -> str:
    digest = hashlib.blake2b(key=key, digest_size=SIGNATURE_BYTES, person=b"kvasir-lease-v1")
    for part in (key_name.encode(), *(part for name in sorted(fields) for part in (name, fields[name]))):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
