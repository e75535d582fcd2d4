"""Pinned packages have their files' hashes, are what pyproject.toml asks for, and are audited."""

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from requirements.audit import Pin, ask, judge_vulnerabilities, pinned
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


GOOD, BAD = "a" * 64, "b" * 64
INDEXED = {"files": [{"filename": "x-1.whl", "hashes": {"sha256": GOOD}, "yanked": False}]}
FLAW = {"id": "PYSEC-1", "aliases": ["CVE-1"], "summary": "It leaks.", "fixed_in": ["2"], "withdrawn": None}


class Index:
    """A package index on loopback: paths and what lies there."""

    def __init__(self) -> None:
        self.pages: dict[str, Any] = {}
        pages = self.pages

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.end_headers()
                if page is not None:
                    self.wfile.write(page if isinstance(page, bytes) else json.dumps(page).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index()
    thread = threading.Thread(target=index.server.serve_forever)
    thread.start()
    yield index
    index.server.shutdown()
    thread.join()
    index.server.server_close()


def pin(*hashes: str) -> Pin:
    return Pin("x", "1", frozenset(hashes))


def test_a_pin_of_which_the_index_knows_nothing_bad_has_no_complaint(index: Index) -> None:
    index.pages["/simple/x/"] = INDEXED
    index.pages["/pypi/x/1/json"] = {"info": {"version": "1"}, "vulnerabilities": []}
    answer = ask(pin(GOOD), index.url)
    assert (answer.complaints, answer.knows_files, answer.knows_vulnerabilities) == ([], True, True)


def test_a_version_that_was_taken_back_is_named_with_the_reason(index: Index) -> None:
    index.pages["/simple/x/"] = {"files": [{"hashes": {"sha256": GOOD}, "yanked": "it is broken"}]}
    assert ask(pin(GOOD), index.url).complaints == ["was taken back: it is broken"]


def test_a_hash_that_the_index_does_not_have_is_named(index: Index) -> None:
    index.pages["/simple/x/"] = INDEXED
    assert ask(pin(GOOD, BAD), index.url).complaints == [f"the index has no file with the hash {BAD}"]


def test_a_vulnerability_is_named_with_what_mends_it(index: Index) -> None:
    index.pages["/pypi/x/1/json"] = {"info": {"version": "1"}, "vulnerabilities": [FLAW]}
    assert ask(pin(GOOD), index.url).complaints == ["PYSEC-1: It leaks. (fixed in 2)"]


def test_what_the_index_says_of_another_version_is_not_taken_for_this_one(index: Index) -> None:
    index.pages["/pypi/x/json"] = {"info": {"version": "2"}, "vulnerabilities": [FLAW]}
    answer = ask(pin(GOOD), index.url)
    assert (answer.complaints, answer.knows_vulnerabilities) == ([], False)


def test_a_vulnerability_that_was_withdrawn_or_does_not_concern_us_is_no_complaint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert judge_vulnerabilities([{**FLAW, "withdrawn": "2026-01-01"}]) == []
    monkeypatch.setattr("requirements.audit.ACCEPTED", {"CVE-1": "nothing of ours calls it"})
    assert judge_vulnerabilities([FLAW]) == []


def test_an_index_that_does_not_answer_or_answers_nonsense_is_no_complaint(index: Index) -> None:
    index.pages["/simple/x/"] = b"<html>"
    answer = ask(pin(GOOD), index.url)
    assert (answer.complaints, answer.knows_files, answer.knows_vulnerabilities) == ([], False, False)


def test_all_pins_are_asked_about_each_version_with_its_own_hashes() -> None:
    pins = pinned()
    assert len(pins) > 200
    assert all(each.hashes for each in pins)
    versions_of_networkx = [each for each in pins if each.name == "networkx"]
    assert len(versions_of_networkx) == 2
    assert not versions_of_networkx[0].hashes & versions_of_networkx[1].hashes
