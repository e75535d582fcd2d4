"""FieldTable: what becomes of each field of a dialect's body: it is honoured, a hint, or refused.

Owns the rule. What would change the answer is honoured or refused by its name; a hint changes nothing and is
passed over. A field that stands in none of the three is passed over as well, since clients send fields that
are newer than this, and counted, so that an operator sees it. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from router.api.json_body import decode_body
from router.errors import InvalidRequest, about_model

Body = TypeVar("Body", bound=msgspec.Struct)

MOST_NAMED = 32
"""Fields of one body that are counted by their names."""

_MOST_IDLE_BYTES = 8
"""Length of a value that asks for nothing."""

NOTHING: tuple[Any, ...] = (None, False, "", [], {})


class FieldRefusal(NamedTuple):
    """`idle` are the values that ask for what happens anyway."""

    message: str
    idle: tuple[Any, ...] = NOTHING
    code: str | None = "unsupported_value"


class FieldTable(Generic[Body]):
    """Reads bodies of one kind, whose fields are those that are honoured. Names are as JSON has them.
    `inner` are the tables of objects in fields; a field that the kind has may be `refused` all the same."""

    def __init__(
        self,
        kind: type[Body],
        *,
        hints: Collection[str] = (),
        refused: Mapping[str, FieldRefusal] | None = None,
        inner: "Mapping[str, FieldTable[Any]] | None" = None,
    ) -> None:
        self.kind = kind
        self._fields = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        self.hints = frozenset(hints) - self._fields.keys()
        self.refused = dict(refused or {})
        self.inner = inner or {}
        self._held_back = [(name, self._fields[name]) for name in self.refused if name in self._fields]
        self.strict_kind = _strict(kind, sorted(self.hints), self.inner, self._fields)
        self._hint_fields = self.strict_kind.__struct_fields__[len(self._fields) :]
        self._strict = msgspec.json.Decoder(self.strict_kind)
        self._lenient = msgspec.json.Decoder(kind)

    @property
    def names(self) -> Collection[str]:
        """The fields that are honoured."""
        return self._fields.keys()

    def read(self, body: bytes) -> tuple[Body, list[str]]:
        """Return the body, and the names of fields that are in no table. Most have none, and are read at
        once. Raises InvalidRequest that names the field."""
        try:
            asked: Body = self._strict.decode(body)
            unknown: list[str] = []
        except (ValueError, RecursionError):
            asked = decode_body(self._lenient, body)
            with about_model(getattr(asked, "model", "")):
                unknown = self._unknown(body, "")
        for name, field in self._held_back:
            if not _is_idle(getattr(asked, field), refusal := self.refused[name]):
                with about_model(getattr(asked, "model", "")):
                    raise _error(name, refusal)
        return asked, unknown

    def without_hints(self, asked: Body) -> Body:
        """Drop hints from a body that is kept: a hint would keep the whole body alive."""
        if any(hint is not None for hint in msgspec.structs.astuple(asked)[len(self._fields) :]):
            for field in self._hint_fields:
                setattr(asked, field, None)
        return asked

    def _unknown(self, body: bytes, path: str) -> list[str]:
        """Raises InvalidRequest for one that is refused."""
        found: list[str] = []
        for name, value in (decode_body(_fields_decoder, body) or {}).items():
            refusal = self.refused.get(name)
            if name in self.inner:
                found += self.inner[name]._unknown(bytes(value), f"{path}{name}.")
            elif refusal is not None:
                if not _asks_nothing(value, refusal):
                    raise _error(f"{path}{name}", refusal)
            elif name not in self._fields and name not in self.hints and len(found) < MOST_NAMED:
                found.append(f"{path}{name}")
        return found


_fields_decoder: "msgspec.json.Decoder[dict[str, msgspec.Raw] | None]" = msgspec.json.Decoder(
    dict[str, msgspec.Raw] | None
)


def _strict(
    kind: type[Body],
    hints: Iterable[str],
    inner: Mapping[str, FieldTable[Any]],
    fields: Mapping[str, str],
) -> type[Body]:
    """Return the kind with its hints as fields that are not looked into, and no others."""
    added: list[tuple[str, Any, Any]] = [
        (f"hint_{number}", msgspec.Raw, msgspec.field(default=None, name=name))
        for number, name in enumerate(hints)
    ]
    added += [
        (fields[name], table.strict_kind | None, msgspec.field(default=None, name=name))
        for name, table in inner.items()
    ]
    made: Any = msgspec.defstruct(
        f"Strict{kind.__name__}", added, bases=(kind,), kw_only=True, forbid_unknown_fields=True
    )
    return made  # type: ignore[no-any-return]


def _asks_nothing(value: msgspec.Raw, refusal: FieldRefusal) -> bool:
    written = bytes(value)
    try:
        return len(written) <= _MOST_IDLE_BYTES and _is_idle(msgspec.json.decode(written), refusal)
    except ValueError:  # 1e999999
        return False


def _is_idle(value: Any, refusal: FieldRefusal) -> bool:
    """0 is not False, and 1 not True."""
    is_switch = isinstance(value, bool)
    return any(value == idle and is_switch == isinstance(idle, bool) for idle in refusal.idle)


def _error(name: str, refusal: FieldRefusal) -> InvalidRequest:
    return InvalidRequest(refusal.message.format(name=name), parameter=name, code=refusal.code)
