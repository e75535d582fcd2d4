"""The tree, the sizes and the documents say the same thing."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

import cluster
import replicas
import router

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def source_files() -> list[str]:
    return [
        name
        for name in tracked_files()
        if name.endswith(".py")
        and not name.endswith(GENERATED)
        and name.split("/")[0]
        in ("replicas", "router", "cluster", "loadtests", "helm", "deploy", "requirements")
    ]


def test_the_packages_are_the_ones_of_this_checkout() -> None:
    for package in (replicas, router, cluster):
        assert Path(str(package.__file__)).resolve().is_relative_to(ROOT)


@pytest.mark.parametrize("name", source_files())
def test_every_file_is_short_documented_and_made_of_short_functions(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= MAX_FILE_LINES
    if tree.body:
        assert ast.get_docstring(tree), "a module says what it owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(node, clean=False)
    return 0 if docstring is None else docstring.count("\n") + 1


def test_the_tree_in_the_architecture_document_is_the_tree() -> None:
    """Every source file is named there, once, and everything named there exists."""
    document = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = document.split("```tree\n")[1].split("```")[0]
    names: list[str] = []
    folder = ""
    for line in tree.splitlines():
        if match := re.match(r"^(\S+/)( |$)", line):
            folder = match[1]
        names.extend(folder + name for name in re.findall(r"[\w/]+\.(?:py|proto)\b", line.split("  #")[0]))
    actual = {
        name
        for name in source_files()
        if not name.endswith("__init__.py") or name == "replicas/toy_model/__init__.py"
    } | {name for name in tracked_files() if name.endswith(".proto")}
    named = set(names)
    assert len(names) == len(named), "named twice"
    assert sorted(actual - named) == [], "in the tree, not in ARCHITECTURE.md"
    assert sorted(named - actual) == [], "in ARCHITECTURE.md, not in the tree"


def test_only_process_edges_read_the_environment() -> None:
    edges = {"replicas/__main__.py", "router/__main__.py", "cluster/cli.py"}
    edges |= {"deploy/images/check_replica.py"}
    edges |= {"replicas/engine_process.py", "replicas/engine_child.py"}  # both sides of one more
    for name in source_files():
        if name in edges or name.startswith("loadtests/"):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"os\.environ|os\.getenv|getenv\(", text), name
