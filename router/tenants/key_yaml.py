"""Reads a key document in YAML incrementally.

Reads in small steps: the usual loaders build all nodes of a document before any value, which for 100,000 keys
blocks all other threads for seconds and takes gigabytes. Special features are refused with a sentence: a
duplicate name in a mapping, a tag, deep nesting.
"""

from collections.abc import Callable, Mapping
from typing import Any

import yaml

_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class BadYaml(ValueError):
    """The error and its place."""


def read_yaml(
    content: bytes, *, max_depth: int, made: Callable[[dict[Any, Any]], object] = lambda found: found
) -> object:
    """Read a document; `made` converts each complete mapping. Raises BadYaml."""
    loader = _Loader(content)
    try:
        return _Reading(loader, max_depth, made).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"{_place(mark)}: "
        raise BadYaml(f"{place}{error.problem}") from error
    except yaml.YAMLError as error:
        raise BadYaml("a character in it cannot be part of YAML") from error
    except BadYaml:
        raise
    except ValueError as error:  # of a date or number that there is not
        raise BadYaml(f"a value in it cannot be: {error}") from error
    finally:
        loader.dispose()


class _Reading:
    def __init__(self, loader: Any, max_depth: int, made: Callable[[dict[Any, Any]], object]) -> None:
        self._loader = loader
        self._max_depth = max_depth
        self._made = made
        self._anchors: dict[str, object] = {}

    def document(self) -> object:
        """Return the only document; None if there is none."""
        next_event = self._loader.get_event
        next_event()
        if isinstance(next_event(), yaml.StreamEndEvent):
            return None
        found = self._value(next_event(), self._max_depth)
        next_event()
        event = next_event()
        if not isinstance(event, yaml.StreamEndEvent):
            raise BadYaml(f"line {_line(event)}: another document begins, and there is to be one")
        return found

    def _value(self, event: Any, levels_left: int) -> object:
        if isinstance(event, yaml.ScalarEvent):
            found = self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise BadYaml(f"line {_line(event)}: {event.anchor!r} is not there, or is not whole yet")
            return self._anchors[event.anchor]
        else:
            if event.tag not in _PLAIN_TAGS:
                raise BadYaml(f"{_place(event.start_mark)}: there is no tag {event.tag!r}")
            if not levels_left:
                raise BadYaml(f"its lists and mappings are more than {self._max_depth} deep in each other")
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            found = self._mapping(levels_left - 1) if is_mapping else self._list(levels_left - 1)
        if event.anchor is not None:
            self._anchors[event.anchor] = found
        return found

    def _list(self, levels_left: int) -> list[object]:
        found = []
        while not isinstance(event := self._loader.get_event(), yaml.SequenceEndEvent):
            found.append(self._value(event, levels_left))
        return found

    def _mapping(self, levels_left: int) -> object:
        found: dict[Any, object] = {}
        merged: dict[Any, object] = {}
        seen = set()
        while not isinstance(event := self._loader.get_event(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise BadYaml(f"line {_line(event)}: what a mapping has there is no name")
            if event.value in seen:
                raise BadYaml(f"line {_line(event)}: a mapping has {event.value!r} twice")
            seen.add(event.value)
            is_merge = self._tag(event) == _MERGE
            name = None if is_merge else self._scalar(event)
            value = self._value(self._loader.get_event(), levels_left)
            if not is_merge:
                found[name] = value
            elif isinstance(value, Mapping):
                merged.update(value)
            else:
                raise BadYaml(f"line {_line(event)}: what is merged there is no mapping")
        return self._made({**merged, **found} if merged else found)

    def _tag(self, event: Any) -> str:
        if event.tag is not None and event.tag != "!":
            return str(event.tag)
        return str(self._loader.resolve(yaml.ScalarNode, event.value, event.implicit))

    def _scalar(self, event: Any) -> object:
        tag = self._tag(event)
        if tag == _STR:
            return event.value
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        found: object = self._loader.construct_object(node)
        self._loader.constructed_objects.clear()  # else it keeps all of them
        return found


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
