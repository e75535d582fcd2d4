"""Likeness: which templates and values the fast engine renders like the reference.

Owns the known differences: filters and methods, odd numbers, and separators that only Python treats as
blanks. Odd numbers are whole fractions (`tojson` of 1.0 writes 1), those that Python writes with an exponent,
and integers beyond 64 bits. They do no harm in a dictionary that is written as a whole.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2.nodes
import msgspec

LIKE_FILTERS = frozenset(
    """capitalize count d default dictsort first int items join last length list lower map reject rejectattr
    replace reverse safe select selectattr string title tojson trim upper""".split()
)
"""Some other filters differ in common texts, and almost no chat template uses them."""

UNLIKE_METHODS = frozenset(
    """append clear copy extend insert isalnum isalpha islower isupper pop popitem remove reverse setdefault
    sort splitlines title update""".split()
)
"""Methods that classify characters differently, or that change a value, which the reference forbids."""

_SEPARATORS = "\x1c\x1d\x1e\x1f"
"""Python strips them as blanks and splits at them."""

_SPLITTING_METHODS = frozenset(("rsplit", "split"))
_BLANK_METHODS = frozenset(("lstrip", "rstrip", "strip"))
_LISTING_FILTERS = frozenset("dictsort items list map reject rejectattr reverse select selectattr".split())
_BLANK_FILTERS = frozenset(("title", "trim"))
_CAPITAL_FILTERS = frozenset(("capitalize", "title"))
_FLOAT_IN_MSGPACK = b"\xcb"
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_encode = msgspec.msgpack.Encoder().encode


def is_like(tree: jinja2.nodes.Template) -> bool:
    """Whether the template has nothing that the engines are known to treat differently."""
    if not LIKE_FILTERS.issuperset(_filters(tree)):
        return False
    if any(used.attr in UNLIKE_METHODS for used in tree.find_all(jinja2.nodes.Getattr)):
        return False
    if _calls_without_arguments(tree, _SPLITTING_METHODS) or any(map(_is_list, _printed(tree))):
        return False
    # Fractions that the template makes itself reach texts whatever a request has.
    makes_fraction = any(type(const.value) is float for const in tree.find_all(jinja2.nodes.Const))
    return not makes_fraction and next(tree.find_all(jinja2.nodes.Div), None) is None


def minded_characters(tree: jinja2.nodes.Template) -> str:
    """Return characters whose presence in the fast engine's text may make the reference's text differ."""
    used = frozenset(_filters(tree))
    trims = not used.isdisjoint(_BLANK_FILTERS) or _calls_without_arguments(tree, _BLANK_METHODS)
    capitals = not used.isdisjoint(_CAPITAL_FILTERS) or _calls_without_arguments(
        tree, frozenset(("capitalize",))
    )
    # Python ends a word in another sigma.
    return _SEPARATORS * trims + "σ" * capitals


def _calls_without_arguments(tree: jinja2.nodes.Template, methods: frozenset[str]) -> bool:
    return any(
        isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr in methods and not call.args
        for call in tree.find_all(jinja2.nodes.Call)
    )


def _printed(tree: jinja2.nodes.Template) -> Iterator[jinja2.nodes.Expr]:
    for output in tree.find_all(jinja2.nodes.Output):
        yield from output.nodes


def _is_list(printed: jinja2.nodes.Expr) -> bool:
    """Whether the template makes the list itself; the engines escape such lists differently from given
    ones."""
    if isinstance(printed, jinja2.nodes.Filter):
        return printed.name in _LISTING_FILTERS
    return isinstance(printed, (jinja2.nodes.List, jinja2.nodes.Dict, jinja2.nodes.Tuple))


def _filters(tree: jinja2.nodes.Template) -> Iterator[str]:
    """By name; `map` has another one's as its first argument."""
    for used in tree.find_all(jinja2.nodes.Filter):
        yield used.name
        if used.name == "map" and used.args:
            mapped = used.args[0]
            yield str(mapped.value) if isinstance(mapped, jinja2.nodes.Const) else ""


def may_have_odd_values(values: Any) -> bool:
    """Whether there may be odd values; fast if there are none."""
    try:
        return _FLOAT_IN_MSGPACK in _encode(values)
    except (OverflowError, UnicodeEncodeError):  # an integer beyond 64 bits; half a surrogate pair
        return True


class Watch:
    """Notes whether a template takes an odd number out of its container: `has_seen`. Reads by `tojson` do not
    count. Half a surrogate pair counts anywhere. For one rendering of the result of `over`."""

    __slots__ = ("has_seen",)

    def __init__(self) -> None:
        self.has_seen = False

    def over(self, value: Any) -> Any:
        """Wrap a value. A number without a container counts as seen."""
        if isinstance(value, Mapping):
            found = {self.over(key): self._inside(item) for key, item in value.items()}
            return _WatchedDict(self, found) if any(map(_is_odd, value.values())) else found
        if isinstance(value, list):
            items = [self._inside(item) for item in value]
            return _WatchedList(self, items) if any(map(_is_odd, value)) else items
        self.has_seen |= _is_odd(value) or (isinstance(value, str) and _HALF_PAIR.search(value) is not None)
        return value

    def _inside(self, value: Any) -> Any:
        return value if _is_odd(value) else self.over(value)

    def see(self, item: Any) -> Any:
        self.has_seen |= _is_odd(item)
        return item


class _WatchedDict(dict[Any, Any]):
    def __init__(self, watch: Watch, items: dict[Any, Any]) -> None:
        super().__init__(items)
        self._watch = watch

    def __getitem__(self, key: Any) -> Any:
        return self._watch.see(super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return self._watch.see(super().get(key, default))

    def items(self) -> Any:
        self._watch.has_seen = True
        return super().items()

    def values(self) -> Any:
        self._watch.has_seen = True
        return super().values()


class _WatchedList(list[Any]):
    def __init__(self, watch: Watch, items: list[Any]) -> None:
        super().__init__(items)
        self._watch = watch

    def __getitem__(self, place: Any) -> Any:
        return self._watch.see(super().__getitem__(place))

    def __iter__(self) -> Iterator[Any]:
        self._watch.has_seen = True
        return super().__iter__()


def _is_odd(value: Any) -> bool:
    if type(value) is float:
        return not math.isfinite(value) or value.is_integer() or "e" in repr(value)
    return type(value) is int and not -(2**63) <= value < 2**64
