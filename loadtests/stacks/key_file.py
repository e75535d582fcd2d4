"""A file of API keys for a stack: one new key for each of some tenants."""

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from router.caller import Right, Tenant
from router.features.api_keys.key_document import write_json
from router.features.api_keys.key_record import RANDOM_BYTES, KeyDocument, KeyRecord, make_key


def write_key_file(path: Path, tenants: Iterable[Tenant], *, operators: Iterable[str] = ()) -> dict[str, str]:
    """Return the texts of the keys, by the names of their tenants. Those of `operators` have the right
    `admin`."""
    named = {tenant.name: tenant for tenant in tenants}
    texts: dict[str, str] = {}
    records = []
    for name in named:
        key_id, texts[name] = make_key(secrets.token_bytes(RANDOM_BYTES))
        digest = hashlib.sha256(texts[name].encode()).hexdigest()
        rights = frozenset({Right.ADMIN}) if name in operators else frozenset[Right]()
        records.append(KeyRecord(key_id=key_id, sha256=digest, tenant=name, rights=rights))
    path.touch(mode=0o600)
    path.write_bytes(write_json(KeyDocument(named, tuple(records))))
    return texts
