"""What thousands of requests in every dialect are answered with is what was recorded.

A change that means to alter answers records them anew: `python -m tests.oracle write`. To see both texts of
an answer, record the commit before and this one, and compare (docs/develop.md).
"""

import json
from pathlib import Path

import pytest

from tests.oracle.__main__ import ANSWERS, RECORDING, digests, record


@pytest.mark.cluster
def test_every_answer_is_as_recorded(tmp_path: Path) -> None:
    record(tmp_path / "new", Path.cwd(), ANSWERS)
    expected: dict[str, dict[str, str]] = json.loads(RECORDING.read_text("utf-8"))
    found = digests(tmp_path / "new")
    differing = [
        f"{group}: {label}"
        for group in sorted(expected.keys() | found.keys())
        for label in expected.get(group, {}).keys() | found.get(group, {}).keys()
        if expected.get(group, {}).get(label) != found.get(group, {}).get(label)
    ]
    assert not differing, f"{len(differing)} answers differ: {sorted(differing)[:40]}"
