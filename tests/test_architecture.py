"""The tree, the sizes and the documents say the same thing."""

import ast
import re
from pathlib import Path

import cluster
import replicas
import router
from docs.make_file_map import ROOT, file_map, source_files

MAX_FUNCTION_LINES = 60


def test_the_packages_are_the_ones_of_this_checkout() -> None:
    for package in (replicas, router, cluster):
        assert Path(str(package.__file__)).resolve().is_relative_to(ROOT)


def test_every_file_is_documented_and_made_of_short_functions() -> None:
    problems = [problem for name in source_files() for problem in problems_of(name)]
    assert not problems, "\n".join(problems)


def problems_of(name: str) -> list[str]:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    found = []
    if tree.body:
        docstring = ast.get_docstring(tree)
        if not docstring:
            found.append(f"{name}: a module says what it owns")
        elif not docstring.partition("\n")[0].endswith((".", "?")):
            found.append(f"{name}: its first line is a sentence, for the map of files")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            if length > MAX_FUNCTION_LINES:
                found.append(f"{name}: {node.name} has {length} lines")
    return found


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(node, clean=False)
    return 0 if docstring is None else docstring.count("\n") + 1


def test_the_file_map_has_every_source_file_and_room_with_its_line() -> None:
    lines = file_map().splitlines()
    names = {line.split()[0] for line in lines}
    assert {name.rpartition("/")[2] for name in source_files() if not name.endswith("__init__.py")} <= names
    assert not [line for line in lines if len(line.split()) < 3]


def test_every_room_is_in_the_architecture_document() -> None:
    document = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = {
        name.removesuffix("__init__.py")
        for name in source_files()
        if name.endswith("/__init__.py") and name.count("/") == 2
    }
    assert not [room for room in sorted(rooms) if f"`{room}`" not in document]


def test_only_process_edges_read_the_environment() -> None:
    edges = {"replicas/__main__.py", "router/__main__.py", "cluster/cli.py"}
    edges |= {"deploy/images/check_replica.py", "helm/files/check_cached_tokens.py"}
    edges |= {
        "replicas/engine_process/parent.py",
        "replicas/engine_process/child.py",
    }  # both sides of one more
    for name in source_files():
        if name in edges or name.startswith("loadtests/"):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"os\.environ|os\.getenv|getenv\(", text), name
