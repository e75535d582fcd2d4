"""No room grows unseen: `sizes.json` has the most lines of each, and of its tests."""

import json
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tests import sizes

WRITE = 'python -m tests.sizes --write "REASON"'


class FarBelow(UserWarning):
    pass


pytestmark = pytest.mark.filterwarnings("default::tests.test_sizes.FarBelow")


def test_no_room_has_more_lines_than_the_file_says() -> None:
    bounds, found = sizes.read(), sizes.count()
    grown = [line for line in sizes.differences(bounds, found, 1) if "(+" in line]
    assert not grown, f"{WRITE} says what these lines buy:\n" + "\n".join(grown)
    if shrunk := sizes.differences(bounds, found, sizes.FAR_BELOW):
        warnings.warn(FarBelow(f"{WRITE} keeps what was saved:\n" + "\n".join(shrunk)), stacklevel=2)


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("router/api/openai/chat.py", ("router/api", "code")),
        ("router/app.py", ("router", "code")),
        ("tests/router/api/openai/test_chat.py", ("router/api", "tests")),
        ("tests/router/test_app.py", ("router", "tests")),
        ("tests/helm/test_values.py", ("helm", "tests")),
        ("helm/dashboards/grafana.py", ("helm", "code")),
        ("tests/clients/scripts/codex.py", ("clients", "tests")),
        ("tests/tools.py", ("tests", "tests")),
    ],
)
def test_a_file_counts_for_the_room_that_it_stands_in_or_mirrors(name: str, room: tuple[str, str]) -> None:
    assert sizes.room_of(name) == room


def test_a_room_that_grows_is_named_and_keeps_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sizes, "FILE", tmp_path / "sizes.json")
    found = {"router/api": Counter(code=100, tests=90), "router/queue": Counter(code=50, tests=40)}
    monkeypatch.setattr(sizes, "count", lambda: found)
    sizes.write("the first count")
    assert sizes.differences(sizes.read(), found, 1) == []
    found["router/api"]["code"], found["router/queue"]["tests"] = 110, 20
    assert sizes.differences(sizes.read(), found, 50) == ["router/api: code 100 -> 110 (+10)"]
    sizes.write("a dialect")
    assert json.loads(sizes.FILE.read_text()) == {
        "router/api": {"code": 110, "tests": 90, "raised": ["code +10, tests +0: a dialect"]},
        "router/queue": {"code": 50, "tests": 20, "raised": []},
    }
