"""The comparison of formulas with processors: silent where they agree, and loud where they do not."""

import sys

import pytest

from loadtests.benches.image_rules import main
from replicas.protocol.image_rules import CellRule
from replicas.protocol.images import ImageSize


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["image_rules", "--sizes", "60", "--images", "2"])


def test_formulas_and_processors_agree(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main()
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 0
    assert len(lines) == 15
    assert all(" 0 different" in line for line in lines)


def test_a_formula_that_is_off_by_one_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(rule: CellRule, size: ImageSize) -> int:
        return 1 + right(rule, size)

    right = CellRule.num_tokens
    monkeypatch.setattr(CellRule, "num_tokens", count)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert "different: " in capsys.readouterr().out
