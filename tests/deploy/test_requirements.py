"""Every pinned package has the hashes of its files, and what is pinned is what pyproject.toml asks for."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from requirements.relock import FILES, path_of, read_pins, split_pins, versions

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [file.name for file in FILES]
FOR_WINDOWS = " ; sys_platform == 'win32'"


@pytest.mark.parametrize("name", NAMES)
def test_every_pin_has_hashes(name: str) -> None:
    pins = read_pins(path_of(name))
    assert pins
    for package, lines in pins.items():
        assert re.match(r"[\w.-]+==[\w.+]+", lines), package
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", lines), package


def test_every_file_of_pins_is_made_by_the_script() -> None:
    files = {path.stem for path in (ROOT / "requirements").glob("*.txt")}
    assert files == {*NAMES, "vllm-overrides"}


def test_no_package_is_pinned_twice_differently() -> None:
    """But by vLLM's files, one of which is for CPUs and one for GPUs, and by those of environments of their
    own. What is for Windows in one file may be for all systems in another."""
    pinned: dict[str, list[str]] = {}
    for name in NAMES:
        if not name.startswith(("vllm", "clients-")):
            for package, lines in read_pins(path_of(name)).items():
                found = [pin.removesuffix(FOR_WINDOWS) for pin in versions({package: lines})]
                assert pinned.setdefault(package, found) == found


def test_what_pyproject_names_is_pinned_as_it_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = {
        ("lock", "torch"): project["project"]["dependencies"],
        ("loadtest",): project["project"]["optional-dependencies"]["loadtest"],
        ("lock", "loadtest", "dev"): project["dependency-groups"]["dev"],
    }
    for names, requirements in asked.items():
        pins = {pin.split(" ")[0] for name in names for pin in versions(read_pins(path_of(name)))}
        wanted = {re.sub(r"\[.*?\]", "", requirement) for requirement in requirements}
        assert wanted - pins == set()


def test_serving_images_have_nothing_that_only_load_tests_need() -> None:
    loadtest = set(read_pins(path_of("loadtest")))
    assert {"locust", "gevent", "flask", "pytest"} <= loadtest
    for name in ("lock", "router", "torch"):
        assert set(read_pins(path_of(name))) & loadtest == set(), name
    for dockerfile in (ROOT / "deploy/images").glob("*.Dockerfile"):
        assert "loadtest.txt" not in dockerfile.read_text("utf-8")


def test_a_file_that_is_not_what_the_pin_says_is_refused(tmp_path: Path) -> None:
    """By the installer that ./kvasir and the images use."""
    pin = read_pins(path_of("build"))["editables"]
    false = tmp_path / "false.txt"
    false.write_text(re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", pin), "utf-8")
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--no-deps", "--require-hashes", "--target", tmp_path / "packages"]
    done = subprocess.run(
        [*command, "--no-cache", "--requirement", false], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "editables" in done.stderr


def test_pins_are_read_with_their_markers_and_hashes() -> None:
    first = "a==1 ; python_version < '3.12' \\\n    --hash=sha256:00\n"
    text = f"# A heading.\n{first}a==2 \\\n    --hash=sha256:11\nb==3\n"
    pins = split_pins(text)
    assert list(pins) == ["a", "b"]
    assert versions(pins) == ["a==1 ; python_version < '3.12'", "a==2", "b==3"]
