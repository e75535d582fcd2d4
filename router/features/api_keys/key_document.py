"""The document of tenants and keys: read from YAML or JSON, checked whole, and written again.

    tenants:
      search:
        groups: [staff]
        weight: 2.0
        slo_seconds: 3.0
        limits: {requests_per_minute: 600, max_sequences: 16, store_share: 0.25}
    keys:
      - key_id: 0f1e2d3c4b5a
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        tenant: search
        rights: [explain]
        expires: 2027-01-01T00:00:00Z

Owns the refusals: a document is in force whole or not at all. A text that begins with a brace is JSON, which
is read about eight times as fast. Rewriting drops comments.
"""

import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import msgspec
import yaml

from router.caller import NO_LIMITS, Limits, Right, Tenant
from router.features.api_keys.key_record import KeyDocument, KeyRecord, is_key_id

MAX_BYTES = 64 * 2**20
"""Size of a document: about 300,000 keys."""
MAX_YAML_BYTES = 2**20
"""Size of a document in YAML, as large as a Secret of Kubernetes: about 7,000 keys. Reading it keeps other
threads waiting for up to a quarter of a second."""
MAX_DEPTH = 32
"""Nesting of lists and mappings, and a few hundred columns: the YAML reader recurses."""
MAX_LINE_BYTES = 1024
MOST_GROUPS = 16
MOST_NAME_CHARACTERS = 256
LARGEST_NUMBER = 2**53
DEFAULT_WEIGHT = 1.0

Fields = TypeVar("Fields", "_TenantFields", KeyRecord)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MERGE = "tag:yaml.org,2002:merge"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BRACKET = re.compile(rb"[\[\]{}]")


class BadKeys(ValueError):
    """An error in a document and its place, in one sentence without secrets."""


class _TenantFields(msgspec.Struct, forbid_unknown_fields=True):
    groups: tuple[str, ...] = ()
    weight: float = DEFAULT_WEIGHT
    slo_seconds: float | None = None
    limits: Limits = NO_LIMITS


def read_document(content: bytes) -> KeyDocument:
    """Raises BadKeys. Takes a second for 100,000 keys as JSON, so not on an event loop."""
    if len(content) > MAX_BYTES:
        raise BadKeys(f"it has {len(content)} bytes; {MAX_BYTES} are allowed")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadKeys(f"byte {error.start} is not UTF-8") from error
    plain = _from_json(text) if text.lstrip().startswith("{") else _from_yaml(content)
    return document_from(plain)


def document_from(plain: object) -> KeyDocument:
    """From mappings, lists and texts. Raises BadKeys."""
    if plain is None:
        raise BadKeys("it is empty; a document without keys says `keys: []`")
    if not isinstance(plain, dict):
        raise BadKeys("it is not a mapping with `tenants` and `keys`")
    for field in plain:
        if field not in ("tenants", "keys"):
            raise BadKeys(f"it has an unknown field {field!r}; there are `tenants` and `keys`")
    if "keys" not in plain:
        raise BadKeys("it has no `keys`; a document without keys says `keys: []`")
    named, listed = plain.get("tenants", {}), plain["keys"]
    if not isinstance(named, dict):
        raise BadKeys("tenants: this is not a mapping of names to tenants")
    if not isinstance(listed, list):
        raise BadKeys("keys: this is not a list")
    tenants = {name: _tenant(name, entry) for name, entry in named.items()}
    keys: dict[str, KeyRecord] = {}
    for place, entry in enumerate(listed):
        key = _key(f"keys[{place}]", entry)
        if key.key_id in keys:
            raise BadKeys(f"keys[{place}]: another key has the id {key.key_id}")
        if key.tenant not in tenants:
            raise BadKeys(f"keys[{place}]: the key {key.key_id} is of {key.tenant!r}, not one of the tenants")
        keys[key.key_id] = key
    return KeyDocument(tenants, tuple(keys.values()))


def plain_document(document: KeyDocument) -> dict[str, Any]:
    """Return the argument of `document_from`."""
    tenants = {name: plain_tenant(tenant) for name, tenant in document.tenants.items()}
    keys = [msgspec.to_builtins(key) for key in document.keys]
    for key in keys:
        if "rights" in key:
            key["rights"].sort()
    return {"tenants": tenants, "keys": keys}


def plain_tenant(tenant: Tenant) -> dict[str, Any]:
    """Return the values that differ from their defaults."""
    plain: dict[str, Any] = msgspec.to_builtins(tenant)
    del plain["name"]
    if tenant.weight == DEFAULT_WEIGHT:
        plain.pop("weight", None)
    return plain


def write_json(document: KeyDocument) -> bytes:
    return msgspec.json.encode(plain_document(document))


def write_yaml(document: KeyDocument) -> bytes:
    """Raises BadKeys if there are too many."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(plain_document(document), Dumper=dumper, sort_keys=False, allow_unicode=True)
    content = text.encode()
    _check_yaml_size(content)
    return content


def _tenant(name: object, entry: object) -> Tenant:
    where = f"tenants.{name}"
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise BadKeys(f"tenants: {name!r} is not a name, which has up to 64 letters, digits, `.`, `_`, `-`")
    fields = _converted(where, {} if entry is None else entry, _TenantFields)
    for group in fields.groups:
        if _NAME.fullmatch(group) is None:
            raise BadKeys(f"{where}.groups: {group!r} is not a name")
    if len(set(fields.groups)) < len(fields.groups) or len(fields.groups) > MOST_GROUPS:
        raise BadKeys(f"{where}.groups: these are not up to {MOST_GROUPS} different names")
    _check_positive(f"{where}.weight", fields.weight)
    _check_positive(f"{where}.slo_seconds", fields.slo_seconds)
    _check_limits(where, fields.limits)
    return Tenant(
        name=name,
        groups=fields.groups,
        weight=fields.weight,
        slo_seconds=fields.slo_seconds,
        limits=fields.limits,
    )


def _key(where: str, entry: object) -> KeyRecord:
    key = _converted(where, entry, KeyRecord)
    if not is_key_id(key.key_id):
        # Neither is shown where it is wrong: it might be the key itself.
        raise BadKeys(f"{where}.key_id: this is not an id of 12 hex digits")
    if _SHA256.fullmatch(key.sha256) is None:
        raise BadKeys(f"{where}.sha256: this is not a SHA-256 in 64 hex digits, as `kvasir keys` writes it")
    if key.name is not None and (len(key.name) > MOST_NAME_CHARACTERS or not key.name.isprintable()):
        raise BadKeys(f"{where}.name: this is not a line of up to {MOST_NAME_CHARACTERS} characters")
    _check_limits(where, key.limits)
    return key


def _check_limits(where: str, limits: Limits) -> None:
    if limits is NO_LIMITS:
        return
    for field in limits.__struct_fields__:
        value = getattr(limits, field)
        _check_positive(f"{where}.limits.{field}", value)
        if field.endswith("_share") and value is not None and value > 1:
            raise BadKeys(f"{where}.limits.{field}: {value:g} is more than the whole, which is 1")


def _check_positive(where: str, value: float | None) -> None:
    if value is not None and not 0 < value <= LARGEST_NUMBER:
        shown = value if math.isfinite(value) else f"{value}"
        raise BadKeys(f"{where}: {shown} is not above zero; leave it out for no bound")


def _converted(where: str, entry: object, kind: type[Fields]) -> Fields:
    if isinstance(entry, kind):
        return entry
    try:
        return msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        hint = ""
        if "enum value" in what:
            hint = f"; there are {', '.join(Right)}"
        elif "datetime" in what:
            hint = "; write it like 2027-01-01T00:00:00Z"
        elif what.startswith("Expected `str`"):
            hint = "; put it between quotation marks"
        raise BadKeys(f"{where}{path.rstrip('`')}: {what[:1].lower()}{what[1:]}{hint}") from error


def _made_early(found: dict[str, Any]) -> KeyRecord | dict[str, Any]:
    return _key_early(found) if "sha256" in found else found


def _key_early(found: dict[str, Any]) -> KeyRecord | dict[str, Any]:
    """Convert a mapping to its key as soon as it is read; one that is no key is reported later, with its
    place. The garbage collector would walk 100,000 mappings again and again, while all other threads wait; it
    does not walk records."""
    try:
        key = msgspec.convert(found, KeyRecord)
    except msgspec.ValidationError:
        return found
    if key.rights:
        key = msgspec.structs.replace(key, rights=_one_of_equal(key.rights))
    return key


@functools.cache
def _one_of_equal(rights: frozenset[Right]) -> frozenset[Right]:
    return rights


def _from_json(text: str) -> object:
    def mapping(pairs: list[tuple[str, Any]]) -> KeyRecord | dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadKeys(f"a mapping has {twice!r} twice")
        return _made_early(found)

    def constant(name: str) -> NoReturn:
        raise BadKeys(f"{name} is not a number")

    try:
        return json.loads(text, object_pairs_hook=mapping, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise BadKeys(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise BadKeys("its lists and mappings are too deep in each other") from error


def _from_yaml(content: bytes) -> object:
    _check_yaml_size(content)
    for number, line in enumerate(content.split(b"\n"), 1):
        if len(line) > MAX_LINE_BYTES:
            raise BadKeys(f"line {number} has more than {MAX_LINE_BYTES} bytes")
    if any(depth > MAX_DEPTH for depth in _depths(content)):
        raise BadKeys(f"its lists and mappings are more than {MAX_DEPTH} deep in each other")
    try:
        loader = _Loader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_mappings(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise BadKeys(f"{place}{', '.join(filter(None, (error.context, error.problem)))}") from error
    except yaml.YAMLError as error:
        raise BadKeys("a character in it cannot be part of YAML") from error
    except BadKeys:
        raise
    except ValueError as error:  # of a date or number that there is not
        raise BadKeys(f"a value in it cannot be: {error}") from error


def _check_yaml_size(content: bytes) -> None:
    if len(content) > MAX_YAML_BYTES:
        raise BadKeys(
            f"it has {len(content)} bytes of YAML; {MAX_YAML_BYTES} are allowed: keep that many keys in "
            "Redis (setting keys_in_redis), or write them as JSON"
        )


def _check_mappings(node: yaml.Node) -> None:
    """Refuse a mapping with a name twice, and merges of more than one mapping. Raises BadKeys."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        names = set()
        for name, value in node.value:
            place = f"line {name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode):
                raise BadKeys(f"{place}: what a mapping has there is no name")
            if name.value in names:
                raise BadKeys(f"{place}: a mapping has {name.value!r} twice")
            if name.tag == _MERGE and not isinstance(value, yaml.MappingNode):
                raise BadKeys(f"{place}: what is merged there is no mapping")
            names.add(name.value)
            waiting.append(value)


def _depths(content: bytes) -> Iterator[int]:
    depth = 0
    for bracket in _BRACKET.finditer(content):
        depth += 1 if bracket[0] in b"[{" else -1
        yield depth
