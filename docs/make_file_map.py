"""Prints the map of files: `python docs/make_file_map.py [FOLDER]`.

Every line is a module's own first line. Folders without Python have their line here. A contract in
pyproject.toml lists the pure modules (●); other modules of the serving packages are marked ○.
"""

import ast
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("replicas", "router", "cluster", "loadtests")
SERVING = ("replicas", "router", "cluster")
PROGRAMS = ("helm", "deploy", "docs", "requirements")
OTHER_FOLDERS = {
    "router/features/live_page/page/": "The live page's HTML, CSS and JavaScript, as they are served.",
    "helm/": "The chart: routers, pools of replicas, Redis. README.md has its values.",
    "helm/files/": "What the chart puts into pods.",
    "helm/templates/": "The objects; helm/ci/ has examples of values.",
    "helm/dashboards/": "Grafana's dashboards: four JSON files, and what makes them.",
    "helm/rules/": "Recording and alert rules for Prometheus, and their unit tests.",
    "deploy/": "Docker Compose, KubeRay, Ray on machines of one's own, Prometheus and Grafana.",
    "deploy/images/": "Dockerfiles of router and replicas, and a base image from Debian's packages.",
    "docs/": "A page for each thing that a reader wants to do, and what makes the tables in them.",
    "requirements/": "The pinned dependencies, each with the hashes of its files.",
    "tests/": "Mirror the packages; golden/ integration/ e2e/; helm/ for chart, dashboards and rules.",
}


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [each for each in listed.stdout.splitlines() if (ROOT / each).exists() and "_pb2." not in each]


def source_files() -> list[str]:
    return [
        name for name in tracked_files() if name.endswith(".py") and name.split("/")[0] in PACKAGES + PROGRAMS
    ]


def first_line(name: str) -> str:
    """Return the first line of a module's docstring."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def file_map(below: str = "") -> str:
    """List the folders below a path, and the source files in each."""
    described = {name.removesuffix("__init__.py"): first_line(name) for name in _named("__init__.py")}
    described |= OTHER_FOLDERS
    files = [name for name in source_files() if not name.endswith("__init__.py")]
    for name in files:
        described.setdefault(f"{name.rpartition('/')[0]}/", "")
    by_folder = {
        f"{folder}/": sorted(names) for folder, names in groupby(sorted(files, key=_folder), key=_folder)
    }
    return "\n".join(
        "\n".join([f"{folder:<32}{described[folder]}".rstrip(), *map(_line, by_folder.get(folder, []))])
        for folder in sorted(described, key=_order)
        if folder.startswith(below)
    )


def _named(ending: str) -> list[str]:
    return [name for name in tracked_files() if name.endswith(ending) and name.split("/")[0] in PACKAGES]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _order(folder: str) -> tuple[int, str]:
    return ((*PACKAGES, *PROGRAMS, "tests").index(folder.split("/")[0]), folder)


def _line(name: str) -> str:
    return f"  {name.rpartition('/')[2]:<28}{_mark(name)} {first_line(name)}".rstrip()


def _mark(name: str) -> str:
    module = name.removesuffix(".py").replace("/", ".")
    if any(f"{module}.".startswith(f"{pure}.") for pure in _PURE):
        return "●"
    return "○" if name.split("/")[0] in SERVING else " "


def _pure_modules() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = [each["source_modules"] for each in contracts if each["name"] == "the cores are pure"]
    return list(pure)


_PURE = _pure_modules()

if __name__ == "__main__":
    print(file_map(*sys.argv[1:2]))
