"""Values of any of our types with something in *every* field that is not its default.

Whoever takes a value apart and puts it together again (an encoding, a copy) and forgets a field gives
back its default. A value that has none is another one then, also for fields that are still to be added.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from hypothesis import strategies as st

Special = Mapping[Any, st.SearchStrategy[Any]]
"""What to take for a type, or for one field: (class, name)."""


def filled(kind: Any, special: Special | None = None) -> st.SearchStrategy[Any]:
    """Values of a type; whatever fields there are inside are filled, and nothing is absent or empty."""
    special = special or {}
    if kind in special:
        return special[kind]
    if typing.get_origin(kind) is Annotated:
        return _bounded(kind, special)
    if isinstance(kind, typing.NewType):
        return filled(kind.__supertype__, special)
    fields = _fields(kind)
    if fields is None:
        return _plain(kind, special)
    return st.builds(
        kind,
        **{
            name: special.get((kind, name), filled(hint, special)).filter(_differs_from(default))
            for name, (hint, default) in fields.items()
        },
    )


def _bounded(kind: Any, special: Special) -> st.SearchStrategy[Any]:
    """Numbers within the bounds of the annotation; lengths are small enough for any."""
    base, *notes = typing.get_args(kind)
    least = max([note.ge for note in notes if note.ge is not None], default=None)
    most = min([note.le for note in notes if note.le is not None], default=None)
    if base is int:
        return st.integers(max(1, least or 1), min(2**31 - 1, 2**31 - 1 if most is None else most))
    if base is float:
        above = max([note.gt for note in notes if note.gt is not None], default=None)
        lowest = least if above is None else above
        return st.floats(lowest, most, exclude_min=above is not None, allow_nan=False)
    return filled(base, special)


def _differs_from(default: Any) -> Any:
    return lambda value: value != default


def _fields(kind: Any) -> dict[str, tuple[Any, Any]] | None:
    """Of a record: each field's type and default (a sentinel where it has none). None for other types."""
    absent = object()
    if not isinstance(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {
            each.name: (
                hints[each.name],
                absent if each.default is dataclasses.MISSING else each.default,
            )
            for each in dataclasses.fields(kind)
        }
    if issubclass(kind, msgspec.Struct):
        return {
            each.name: (each.type, absent if each.default is msgspec.NODEFAULT else each.default)
            for each in msgspec.structs.fields(kind)
        }
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: (hints[name], kind._field_defaults.get(name, absent)) for name in kind._fields}
    return None


def _plain(kind: Any, special: Special) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        there = [option for option in arguments if option is not type(None)]
        return st.one_of([filled(option, special) for option in there])
    if origin in (list, Sequence):
        return st.lists(filled(arguments[0], special), min_size=1, max_size=2)
    if origin is tuple and arguments[-1] is ...:
        return st.lists(filled(arguments[0], special), min_size=1, max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(filled(each, special) for each in arguments))
    if origin is Mapping:
        keys, values = (filled(each, special) for each in arguments)
        return st.dictionaries(keys, values, min_size=1, max_size=2)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(1, 2**31 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(min_size=1, max_size=5),
        bytes: st.binary(min_size=16, max_size=16),
    }
    return plain[kind]
