"""The table of values in README.md, made from comments in values.yaml: `python helm/make_readme.py`.

Owns how a comment and a value become a row. A value without a comment is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"

_KEY = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z]\w*):(?P<rest>.*)$")


@dataclass(frozen=True, slots=True)
class DocumentedValue:
    path: tuple[str, ...]
    default: Any
    text: str


def documented_values(values_yaml: str) -> Iterator[DocumentedValue]:
    """Yield all values in order, down to the leaves. A comment above a group describes the whole group if
    nothing inside has one. Raises ValueError for a value without a comment."""
    defaults = yaml.safe_load(values_yaml)
    comments = dict(_comments(values_yaml))
    yield from _walk((), defaults, comments)


def _walk(
    path: tuple[str, ...], value: Any, comments: dict[tuple[str, ...], str]
) -> Iterator[DocumentedValue]:
    inner = [other for other in comments if len(other) > len(path) and other[: len(path)] == path]
    if isinstance(value, dict) and inner:
        for name, item in value.items():
            yield from _walk((*path, name), item, comments)
    elif path in comments:
        yield DocumentedValue(path, value, comments[path])
    else:
        raise ValueError(f"{'.'.join(path)} has no comment in values.yaml")


def _comments(values_yaml: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each commented key, with its comment as one line."""
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in values_yaml.splitlines():
        if line.strip().startswith("#"):
            above.append(line.strip().lstrip("#").strip())
            continue
        if key := _KEY.match(line):
            indent = len(key["indent"])
            path = [*(part for part in path if part[0] < indent), (indent, key["name"])]
            if above:
                yield tuple(name for _, name in path), " ".join(above)
        above = []


def values_table(values_yaml: str) -> str:
    lines = ["| value | default | |", "|---|---|---|"]
    for value in documented_values(values_yaml):
        text = value.text.replace("|", "\\|")
        lines.append(f"| `{'.'.join(value.path)}` | {_shown(value.default)} | {text} |")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if default == "":
        return ""
    text = yaml.safe_dump(default, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"`{text}`"


def with_table(readme: str, table: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table + END + after


def main() -> None:
    readme = FOLDER / "README.md"
    table = values_table((FOLDER / "values.yaml").read_text(encoding="utf-8"))
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
