"""KeyRecord: an API key's stored form, and how a new key's text is made and parsed.

The text is `sk-kvasir-{key_id}-{secret}`: an id of 12 hex digits, which is no secret, and 256 random bits. It
is shown once when made; only its SHA-256 is kept, from which the key cannot be recovered.
"""

import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

import msgspec

from router.caller import NO_LIMITS, Caller, Limits, Right, Tenant
from router.features.api_keys.keyring import KEY_PREFIX, HeldKey, Keyring

ID_BYTES = 6
SECRET_BYTES = 32
RANDOM_BYTES = ID_BYTES + SECRET_BYTES

_KEY_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class KeyRecord(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, forbid_unknown_fields=True
):
    """`sha256` is that of the whole key, as hex digits. `limits` hold within those of the tenant. `expires`
    None is never. `name` and `created` are for people."""

    key_id: str
    sha256: str
    tenant: str
    name: str | None = None
    rights: frozenset[Right] = frozenset()
    limits: Limits = NO_LIMITS
    created: Moment | None = None
    expires: Moment | None = None

    def caller(self, tenant: Tenant) -> Caller:
        """Return the caller with this key. A tenant with groups shares with the first."""
        return Caller(
            tenant=tenant,
            key_id=self.key_id,
            group=tenant.groups[0] if tenant.groups else None,
            rights=self.rights,
            limits=self.limits,
        )


class KeyDocument(msgspec.Struct, frozen=True):
    """All tenants and all their keys. Each key's tenant is one of them."""

    tenants: Mapping[str, Tenant]
    keys: tuple[KeyRecord, ...]

    def key(self, key_id: str) -> KeyRecord | None:
        return next((key for key in self.keys if key.key_id == key_id), None)


NO_KEYS = KeyDocument({}, ())


def keyring_of(document: KeyDocument) -> Keyring:
    """Takes a third of a second for 100,000 keys, so not on an event loop."""
    return Keyring({key.key_id: _held(key, document.tenants[key.tenant]) for key in document.keys})


def _held(key: KeyRecord, tenant: Tenant) -> HeldKey:
    expires = None if key.expires is None else key.expires.timestamp()
    return HeldKey(bytes.fromhex(key.sha256), key.caller(tenant), expires)


def make_key(random_bytes: bytes) -> tuple[str, str]:
    """Make a new key's id and text from RANDOM_BYTES secret random bytes."""
    assert len(random_bytes) == RANDOM_BYTES
    key_id = random_bytes[:ID_BYTES].hex()
    secret = urlsafe_b64encode(random_bytes[ID_BYTES:]).rstrip(b"=").decode()
    return key_id, f"{KEY_PREFIX}{key_id}-{secret}"


def is_key_id(text: str) -> bool:
    return _KEY_ID.fullmatch(text) is not None
