"""The audit of pinned packages complains of what an index says against them, and of nothing else."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from requirements.audit import Pin, ask, judge_vulnerabilities, pinned

GOOD, BAD = "a" * 64, "b" * 64
FILES = {"files": [{"filename": "x-1.whl", "hashes": {"sha256": GOOD}, "yanked": False}]}
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
    index.pages["/simple/x/"] = FILES
    index.pages["/pypi/x/1/json"] = {"info": {"version": "1"}, "vulnerabilities": []}
    answer = ask(pin(GOOD), index.url)
    assert (answer.complaints, answer.knows_files, answer.knows_vulnerabilities) == ([], True, True)


def test_a_version_that_was_taken_back_is_named_with_the_reason(index: Index) -> None:
    index.pages["/simple/x/"] = {"files": [{"hashes": {"sha256": GOOD}, "yanked": "it is broken"}]}
    assert ask(pin(GOOD), index.url).complaints == ["was taken back: it is broken"]


def test_a_hash_that_the_index_does_not_have_is_named(index: Index) -> None:
    index.pages["/simple/x/"] = FILES
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
