"""What a document of tenants and keys says, in YAML and in JSON, and what is refused of it."""

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.caller import Limits, Right, Tenant
from router.errors import KeyFault
from router.features.api_keys import key_document
from router.features.api_keys.key_document import BadKeys, read_document, write_json, write_yaml
from router.features.api_keys.key_record import KeyDocument, KeyRecord, keyring_of
from tests.router.features.api_keys.documents import document_of, numbered_key, yaml_of
from tests.router.features.api_keys.some_keys import ACME, ACME_TENANT, OLD, some_keys

_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
_COUNTS = st.integers(1, 2**53)
_SHARES = st.floats(0, 1, exclude_min=True)
_AMOUNTS = st.floats(0, 2.0**53, exclude_min=True)
_ZONES = st.integers(-23, 23).map(lambda hours: timezone(timedelta(hours=hours)))
_MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2900, 1, 1), timezones=_ZONES)
_LIMITS = st.builds(
    Limits,
    requests_per_minute=_COUNTS,
    tokens_per_minute=_COUNTS,
    max_sequences=_COUNTS,
    max_context=_COUNTS,
    lease_share=_SHARES,
    store_share=_SHARES,
)


@st.composite
def whole_documents(draw: st.DrawFn) -> KeyDocument:
    """With every field of every tenant and key set."""
    names = draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True))
    tenants = {
        name: Tenant(
            name=name,
            groups=tuple(draw(st.lists(_NAMES, min_size=1, max_size=16, unique=True))),
            weight=draw(_AMOUNTS),
            slo_seconds=draw(_AMOUNTS),
            limits=draw(_LIMITS),
        )
        for name in names
    }
    ids = draw(st.lists(st.from_regex(r"[0-9a-f]{12}", fullmatch=True), max_size=5, unique=True))
    keys = tuple(
        KeyRecord(
            key_id=key_id,
            sha256=draw(st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
            tenant=draw(st.sampled_from(names)),
            name=draw(st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=40)),
            rights=frozenset(draw(st.sets(st.sampled_from(list(Right)), min_size=1))),
            limits=draw(_LIMITS),
            created=draw(_MOMENTS),
            expires=draw(_MOMENTS),
        )
        for key_id in ids
    )
    return KeyDocument(tenants, keys)


@given(whole_documents())
def test_a_document_reads_as_it_was_written(document: KeyDocument) -> None:
    assert read_document(write_yaml(document)) == document
    assert read_document(write_json(document)) == document


def test_people_may_write_one_too() -> None:
    record, text = numbered_key(7)
    document = read_document(
        f"""
        # Who may ask
        tenants:
          tenant-7:
          search: {{groups: [staff, lab], weight: 2, slo_seconds: 3, limits: {{store_share: 0.25}}}}
        keys:
          - key_id: "{record.key_id}"
            sha256: {record.sha256}
            tenant: tenant-7
            rights: [explain]
            expires: 2027-01-01T00:00:00Z
        """.encode()
    )
    assert document.tenants["search"].groups == ("staff", "lab")
    assert document.tenants["search"].limits == Limits(store_share=0.25)
    assert document.keys[0].expires == datetime(2027, 1, 1, tzinfo=UTC)
    ring = keyring_of(document)
    caller = ring.find(text, now=datetime(2026, 12, 31, tzinfo=UTC).timestamp())
    assert not isinstance(caller, KeyFault)
    assert (caller.tenant.name, caller.key_id, caller.rights) == ("tenant-7", record.key_id, {Right.EXPLAIN})
    assert ring.find(text, now=datetime(2027, 1, 1, tzinfo=UTC).timestamp()) is KeyFault.EXPIRED


def test_a_tenant_shares_with_its_first_group_by_default() -> None:
    record, text = numbered_key(7)
    for groups, namespace in (((), "tenant:tenant-7"), (("lab", "attic"), "group:lab")):
        tenant = Tenant(name="tenant-7", groups=groups)
        caller = keyring_of(KeyDocument({"tenant-7": tenant}, (record,))).find(text, now=0.0)
        assert not isinstance(caller, KeyFault)
        assert caller.namespace == namespace


_SHA = "a" * 64
_KEY = f"key_id: '00aa00aa00aa', sha256: {_SHA}, tenant: a"
_OF_A = "tenants: {a: }\nkeys: [{%s}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "it is empty"),
        (b"{}", "it has no `keys`"),
        (b"- a", "it is not a mapping"),
        (b"tenants: {a: }", "it has no `keys`"),
        (b"keys: []\nuser: 1", "unknown field 'user'"),
        (b"keys: {}", "keys: this is not a list"),
        (b"tenants: []\nkeys: []", "tenants: this is not a mapping"),
        (b"keys: [", "line 2, column 1"),
        (b"keys: \xff", "byte 6 is not UTF-8"),
        (b"keys: \0", "cannot be part of YAML"),
        (b"keys: []\nkeys: []", "line 2: a mapping has 'keys' twice"),
        (b'{"keys": [], "keys": []}', "a mapping has 'keys' twice"),
        (b'{"keys": [NaN]}', "NaN is not a number"),
        (b'{"keys": []', "line 1, column 12"),
        (b'{"tenants": {"a": {}}, "keys": [{"sha256": 3}]}', "keys[0].sha256: expected `str`, got `int`"),
        (b'{"tenants": {"sha256": {"weight": 0}}, "keys": []}', "tenants.sha256.weight: 0.0 is not"),
        (b"? [a]\n: b", "line 1: what a mapping has there is no name"),
        (b"keys: [{expires: 2027-13-01}]", "month must be in 1..12"),
        (b"keys: !!python/object:os.system {}", "line 1, column 7"),
        (b"keys: " + b"[" * 100, "more than 32 deep"),
        (b"[" * 200_000, "line 1 has more than 1024 bytes"),
        (b"[\n" * 200_000, "more than 32 deep"),
        (b'{"keys":' + b"[" * 200_000, "too deep"),
        (b"tenants: {a: {weight: 0}}\nkeys: []", "tenants.a.weight: 0.0 is not above zero"),
        (b"tenants: {a: {weight: .inf}}\nkeys: []", "tenants.a.weight: inf"),
        (b"tenants: {a: {slo_seconds: -1}}\nkeys: []", "tenants.a.slo_seconds: -1.0 is not above zero"),
        (b"tenants: {a: {slo_seconds: .nan}}\nkeys: []", "tenants.a.slo_seconds: nan"),
        (b"tenants: {a: {groups: [b, b]}}\nkeys: []", "tenants.a.groups: "),
        (b"tenants: {a: {groups: ['b c']}}\nkeys: []", "tenants.a.groups: 'b c' is not a name"),
        (b"tenants: {a: {group: [b]}}\nkeys: []", "tenants.a: object contains unknown field `group`"),
        (b"tenants: {a b: }\nkeys: []", "tenants: 'a b' is not a name"),
        (b"tenants: {3: }\nkeys: []", "tenants: 3 is not a name"),
        (_OF_A.replace("a: }", "b: }") % _KEY, "keys[0]: the key 00aa00aa00aa is of 'a'"),
        (_OF_A % f"{_KEY}}}, {{{_KEY}", "keys[1]: another key has the id 00aa00aa00aa"),
        (_OF_A % f"{_KEY}, rights: [all]", "keys[0].rights[0]: invalid enum value 'all'; there are priority"),
        (_OF_A % f"{_KEY}, expires: 2027-01-01", "keys[0].expires: "),
        (_OF_A % f"{_KEY}, expires: 2027-01-01T00:00:00", "with a timezone component; write it like 2027"),
        (_OF_A % f"{_KEY}, limits: {{requests: 1}}", "keys[0].limits: object contains unknown field"),
        (_OF_A % f"{_KEY}, limits: {{max_context: 0}}", "keys[0].limits.max_context: 0 is not above zero"),
        (_OF_A % f"{_KEY}, limits: {{max_sequences: -3}}", "keys[0].limits.max_sequences: -3"),
        (_OF_A % f"{_KEY}, limits: {{lease_share: 1.01}}", "keys[0].limits.lease_share: 1.01 is more"),
        (_OF_A % f"{_KEY}, limits: {{store_share: 0}}", "keys[0].limits.store_share: 0.0 is not above"),
        (_OF_A % f"{_KEY}, limits: {{max_context: 1.5}}", "keys[0].limits.max_context: expected `int"),
        (_OF_A % f"{_KEY}, secret: x", "keys[0]: object contains unknown field `secret`"),
        (_OF_A % f'{_KEY}, name: "a\\nb"', "keys[0].name: "),
        (_OF_A % f"key_id: 123456789012, sha256: {_SHA}, tenant: a", "put it between quotation marks"),
        (_OF_A % "key_id: '00aa00aa00aa', tenant: a", "keys[0]: object missing required field `sha256`"),
        (b"keys: []\n---\nkeys: []", "line 2, column 1: expected a single document in the stream, but"),
        (b"keys: [*b]", "line 1, column 8: found undefined alias"),
        (b"keys: &a [*a]", "keys[0]: expected `object`"),
        (b"tenants: {a: {<<: 3}}\nkeys: []", "line 1: what is merged there is no mapping"),
        ("a:\n" + "".join(" " * depth + "- \n" for depth in range(1, 1000)), "nesting depth"),
        (_OF_A % f"key_id: 00AA00AA00AA, sha256: {_SHA}, tenant: a", "keys[0].key_id: "),
    ],
)
def test_a_wrong_document_is_refused_with_the_place(text: bytes | str, words: str) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(BadKeys, match=re.escape(words)) as caught:
        read_document(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["key_id", "sha256"])
def test_a_key_in_the_place_of_its_hash_is_not_shown(field: str) -> None:
    record, text = numbered_key(7)
    content = yaml_of(7).decode().replace(getattr(record, field), text)
    with pytest.raises(BadKeys) as caught:
        read_document(content.encode())
    assert text[-43:] not in str(caught.value)


def test_half_of_a_document_is_none() -> None:
    content = yaml_of(1, 2)
    whole = document_of(1, 2)
    cut = [content[:length] for length in range(len(content) - 1)]
    read = []
    for part in cut:
        try:
            read.append(read_document(part))
        except BadKeys:
            continue
    assert whole not in read


def test_what_is_said_once_may_be_used_again() -> None:
    text = (
        "tenants:\n  a: {limits: &small {max_sequences: 2, max_context: 9}}\n"
        "  b:\n    limits:\n      <<: *small\n      max_context: 5\nkeys: []\n"
    )
    tenants = read_document(text.encode()).tenants
    assert tenants["a"].limits == Limits(max_sequences=2, max_context=9)
    assert tenants["b"].limits == Limits(max_sequences=2, max_context=5)


def test_a_large_document_in_yaml_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    content = yaml_of(1, 2)
    monkeypatch.setattr(key_document, "MAX_YAML_BYTES", len(content))
    assert read_document(content) == document_of(1, 2)
    with pytest.raises(BadKeys, match=f"it has {len(content) + 1} bytes of YAML; .*keys_in_redis.*JSON"):
        read_document(content + b"\n")
    as_json = write_json(document_of(*range(9)))
    assert len(as_json) > len(content)
    assert read_document(as_json) == document_of(*range(9))


def test_aliases_within_each_other_are_read_in_no_time() -> None:
    levels = "".join(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20))
    with pytest.raises(BadKeys, match=r"keys\[0\]: expected `object`"):
        read_document(b"tenants: {}\nkeys:\n  - &a0 [x]\n" + levels.encode())


def test_a_key_is_known_by_all_of_its_text() -> None:
    keys = some_keys()
    caller = keys.find(ACME, now=0.0)
    assert not isinstance(caller, KeyFault)
    assert caller.tenant == ACME_TENANT
    for place in range(len(ACME)):
        other = ACME[:place] + ("x" if ACME[place] != "x" else "y") + ACME[place + 1 :]
        assert keys.find(other, now=0.0) is KeyFault.UNKNOWN
    assert keys.find(ACME + "A", now=0.0) is KeyFault.UNKNOWN
    assert keys.find(ACME[:-1], now=0.0) is KeyFault.UNKNOWN


def test_a_key_ends_at_its_time_and_says_so_only_to_who_has_it() -> None:
    keys = some_keys()
    assert not isinstance(keys.find(OLD, now=0.99), KeyFault)
    assert keys.find(OLD, now=1.0) is KeyFault.EXPIRED
    assert keys.find(OLD[:-1] + "x", now=1.0) is KeyFault.UNKNOWN


@given(st.text())
def test_any_text_is_compared(text: str) -> None:
    assert some_keys().find(text, now=0.0) is KeyFault.UNKNOWN
