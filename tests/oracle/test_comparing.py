"""What of an answer is replaced, and what a comparison prints."""

import json
from pathlib import Path

import pytest

from tests.oracle.__main__ import compare
from tests.oracle.exchanges import Names, plain


def test_what_differs_by_itself_is_replaced_and_nothing_else() -> None:
    names, one, other = Names(), "a" * 24, "b" * 24
    names.begin("first")
    assert plain(f'"chatcmpl-{one}" "msg_{one}0001"', names) == '"chatcmpl-<first:1>" "msg_<first:1>0001"'
    names.begin("second")
    assert plain(f"resp_{other} resp_{one}", names) == "resp_<second:1> resp_<first:1>"
    untouched = f'"created":17, "hash":"{one}", "tokens":12345678901'
    assert plain(untouched, names) == untouched
    assert plain("retry-after-ms: 812\nx-kvasir-overlap-tokens: 48", None) == (
        "retry-after-ms: <seconds>\nx-kvasir-overlap-tokens: <some>"
    )
    assert plain("x-kvasir-overlap-tokens: 0", None) == "x-kvasir-overlap-tokens: 0"


def test_a_comparison_prints_one_of_those_that_changed_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {"a": '"id":1,\n"model":"m"', "b": '"id":1,\n"model":"m"', "c": "SET key px=60s", "d": "same"}
    after = {"a": '"model":"m"\n"id":1,', "b": '"model":"m"\n"id":1,', "c": "SET key px=30s", "d": "same"}
    for name, content in (("old", before), ("new", after), ("same", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat.json").write_text(json.dumps(content), "utf-8")
    assert compare(tmp_path / "new", tmp_path / "same") == 0
    assert capsys.readouterr().out == ""
    assert compare(tmp_path / "old", tmp_path / "new") == 3
    printed = capsys.readouterr().out
    assert printed.count("--- chat: a") == 1 and "--- chat: b" not in printed
    assert "as chat: a:\n  chat: b\n" in printed
    assert "-SET key px=60s\n+SET key px=30s\n" in printed
