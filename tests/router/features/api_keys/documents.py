"""Documents of tenants and keys, and the keys themselves, as tests need them."""

import hashlib

from router.caller import Tenant
from router.features.api_keys.key_document import write_yaml
from router.features.api_keys.key_record import RANDOM_BYTES, KeyDocument, KeyRecord, make_key


def numbered_key(number: int) -> tuple[KeyRecord, str]:
    """The record and the text of a key of tenant-{number}; always the same for a number."""
    key_id, text = make_key(number.to_bytes(6, "big") + bytes([number % 256]) * (RANDOM_BYTES - 6))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return KeyRecord(key_id=key_id, sha256=digest, tenant=f"tenant-{number}"), text


def document_of(*numbers: int) -> KeyDocument:
    records = [numbered_key(number)[0] for number in numbers]
    return KeyDocument({key.tenant: Tenant(name=key.tenant) for key in records}, tuple(records))


def yaml_of(*numbers: int) -> bytes:
    return write_yaml(document_of(*numbers))
