"""`kvasir keys`: creates and revokes API keys, and sets what their tenants may use.

Owns each action's effect on the document, and what is printed: a new key once, alone on its line.
"""

import argparse
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from cluster.commands.key_arguments import given_limits, read_moment
from cluster.commands.key_store import KeyStore
from cluster.commands.tables import align
from cluster.errors import ClusterError
from router.caller import Limits, Right, Tenant
from router.features.api_keys.key_document import BadKeys, document_from, plain_document, plain_tenant
from router.features.api_keys.key_record import RANDOM_BYTES, KeyDocument, KeyRecord, make_key

Say = Callable[[str], None]

NO_GROUP = "none"


def run(arguments: argparse.Namespace, store: KeyStore, say: Say, tell: Say) -> int:
    """Run the command. `say` prints results, `tell` prints notes. Raises ClusterError."""
    match arguments.action:
        case "create":
            _create(arguments, store, say, tell)
        case "list":
            say(_listed(arguments, store.read()))
        case "revoke":
            _revoke(arguments, store, tell)
        case "tenant":
            _change_tenant(arguments, store, tell)
    return 0


def _create(arguments: argparse.Namespace, store: KeyStore, say: Say, tell: Say) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    key_id, text = make_key(secrets.token_bytes(RANDOM_BYTES))
    record = KeyRecord(
        key_id=key_id,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        tenant=arguments.tenant,
        name=arguments.name,
        rights=frozenset(map(Right, arguments.right)),
        limits=Limits(**given_limits(arguments)),
        created=now,
        expires=_expiry(arguments.expires, now),
    )

    def change(old: KeyDocument) -> KeyDocument:
        tenants = {**old.tenants}
        tenants.setdefault(record.tenant, Tenant(name=record.tenant))
        return _checked(KeyDocument(tenants, (*old.keys, record)))

    new = store.change(change, may_begin=True)
    if sum(key.tenant == record.tenant for key in new.keys) == 1:
        tell(f"This is the first key of the tenant {record.tenant}.")
    tell(f"{store.place} has the key {key_id} now. Store the key below: it is shown only once.")
    say(text)


def _expiry(text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    try:
        moment = read_moment(text, now)
    except (ValueError, OverflowError) as error:
        raise ClusterError(f"--expires takes a day such as 2027-01-31, or 90d or 12h, not {text}") from error
    if moment <= now:
        raise ClusterError(f"--expires {text} is over already")
    return moment


def _revoke(arguments: argparse.Namespace, store: KeyStore, tell: Say) -> None:
    def change(old: KeyDocument) -> KeyDocument:
        for key_id in arguments.key_ids:
            if old.key(key_id) is None:
                raise ClusterError(f"{store.place} has no key {key_id}")
        return KeyDocument(old.tenants, tuple(key for key in old.keys if key.key_id not in arguments.key_ids))

    store.change(change)
    tell(f"Revoked: {', '.join(arguments.key_ids)}. Routers that follow {store.place} know in some seconds.")


def _change_tenant(arguments: argparse.Namespace, store: KeyStore, tell: Say) -> None:
    name = arguments.tenant

    def change(old: KeyDocument) -> KeyDocument:
        tenants = dict(old.tenants)
        if arguments.remove:
            if tenants.pop(name, None) is None:
                raise ClusterError(f"{store.place} has no tenant {name}")
            return KeyDocument(tenants, tuple(key for key in old.keys if key.tenant != name))
        tenants[name] = _changed(tenants.get(name, Tenant(name=name)), arguments)
        return _checked(KeyDocument(tenants, old.keys))

    new = store.change(change, may_begin=not arguments.remove)
    if arguments.remove:
        tell(f"The tenant {name} and all its keys are removed.")
    else:
        tell(f"{name}: {_in_words(new.tenants[name])}")


def _changed(tenant: Tenant, arguments: argparse.Namespace) -> Tenant:
    """Return the tenant with the command line's values set."""
    changes: dict[str, Any] = {
        field: value
        for field in ("weight", "slo_seconds")
        if (value := getattr(arguments, field)) is not None
    }
    if arguments.group is not None:
        changes["groups"] = () if arguments.group == [NO_GROUP] else tuple(arguments.group)
    limits = msgspec.structs.replace(tenant.limits, **given_limits(arguments))
    return msgspec.structs.replace(tenant, **changes, limits=limits)


def _checked(document: KeyDocument) -> KeyDocument:
    """Parse the document as a router would. Raises ClusterError."""
    try:
        return document_from(plain_document(document))
    except BadKeys as error:
        raise ClusterError(f"that cannot be: {error}") from error


def _listed(arguments: argparse.Namespace, document: KeyDocument) -> str:
    only = arguments.tenant
    if only is not None and only not in document.tenants:
        raise ClusterError(f"there is no tenant {only}")
    tenants = [tenant for tenant in document.tenants.values() if only in (None, tenant.name)]
    keys = tuple(key for key in document.keys if only in (None, key.tenant))
    if arguments.json:
        plain = plain_document(KeyDocument({tenant.name: tenant for tenant in tenants}, keys))
        for key in plain["keys"]:
            del key["sha256"]
        return json.dumps(plain, indent=2)
    rows: list[tuple[str, ...]] = [("KEY", "TENANT", "NAME", "RIGHTS", "LIMITS", "CREATED", "EXPIRES")]
    rows += [_row(key) for key in keys]
    lines = [f"{tenant.name}: {_in_words(tenant)}" for tenant in tenants]
    return "\n".join([*lines, *([""] if lines else []), *align(rows)])


def _row(key: KeyRecord) -> tuple[str, ...]:
    return (
        key.key_id,
        key.tenant,
        key.name or "-",
        ",".join(sorted(key.rights)) or "-",
        _pairs(msgspec.to_builtins(key.limits)) or "-",
        _day(key.created),
        _day(key.expires),
    )


def _in_words(tenant: Tenant) -> str:
    plain = plain_tenant(tenant)
    limits = plain.pop("limits", {})
    plain["groups"] = ",".join(tenant.groups)
    return _pairs({name: value for name, value in {**plain, **limits}.items() if value}) or "no limits"


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _day(moment: datetime | None) -> str:
    return "-" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M")
