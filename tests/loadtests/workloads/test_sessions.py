"""A file of sessions is read as it was recorded, and what cannot be is named by its line."""

import gzip
import json
from pathlib import Path

import pytest

from loadtests.workloads.sessions import Session, SessionTurn, is_session_file, parse_sessions, read_sessions

DATA = Path("loadtests/workloads/data")
HEAD = {"format": "kvasir-sessions", "version": 1, "block_tokens": 512}


def turn(num_input_tokens: int, *blocks: list[int], **more: object) -> dict[str, object]:
    return {"in": num_input_tokens, "out": 3, "think": 1.5, "blocks": list(blocks)} | more


def session(session_id: str, *turns: object, **more: object) -> dict[str, object]:
    return {"id": session_id, "lane": 0, "after": 2.0, "agent": "main", "turns": list(turns)} | more


def encoded(*lines: object) -> list[bytes]:
    return [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]


def test_ranges_of_blocks_are_ids_and_a_subagent_knows_its_parent(tmp_path: Path) -> None:
    lines = encoded(
        HEAD,
        session("a", turn(1100, [7, 2]), turn(2048, [7, 1], [20, 3], user=1)),
        session("a.0", turn(100), parent="a", turn=0, agent="explore"),
    )
    (tmp_path / "few.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "few.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    read = read_sessions(tmp_path / "few.jsonl")
    assert read == read_sessions(tmp_path / "few.jsonl.gz")
    assert (read.name, read.block_tokens) == ("few", 512)
    first = SessionTurn(1100, 3, 1.5, ends_user_turn=False, block_ids=(7, 8))
    second = SessionTurn(2048, 3, 1.5, ends_user_turn=True, block_ids=(7, 20, 21, 22))
    child = SessionTurn(100, 3, 1.5, ends_user_turn=False, block_ids=())
    assert read.sessions == (
        Session("a", 0, 2.0, "main", None, None, (first, second)),
        Session("a.0", 0, 2.0, "explore", "a", 0, (child,)),
    )


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "no sessions"),
        ([HEAD], "no sessions"),
        ([HEAD | {"version": 2}], "line 1 .*version 1"),
        ([{"format": "kvasir-sessions", "version": 1}], "line 1 .*block_tokens"),
        ([HEAD, b"\n", b"{\n"], "line 3 "),
        ([HEAD, b"[]\n"], "line 2 .*object"),
        ([HEAD, session("a")], r"line 2 .*turns"),
        ([HEAD, session("a", turn(512, [0, 1]) | {"in": "512"})], r"line 2 .*turns\[0\]\.in"),
        ([HEAD, session("a", turn(512, [0, 1], think=-1))], r"line 2 .*think"),
        ([HEAD, session("a", turn(512, [0, 1], think=1e300))], r"line 2 .*think"),
        ([HEAD, session("a", turn(512, [0, 1], user=2))], r"line 2 .*user"),
        ([HEAD, session("a", turn(1024, [0, 1]))], "line 2 .*turn 0 has 1 blocks; its 1024 tokens are 2"),
        ([HEAD, session("a", turn(512, [0, 10**12]))], "line 2 .*are 1 full"),
        ([HEAD, session("a", turn(512 * 10**12, [0, 10**12]))], r"line 2 .*in`"),
        ([HEAD, session("a", turn(1)), session("a", turn(1))], "line 3 .*already"),
        ([HEAD, session("b", turn(1), parent="a", turn=0)], "line 2 .*'a' is not in the lines before"),
        ([HEAD, session("a", turn(1)), session("b", turn(1), parent="a")], "line 3 .*need each other"),
        ([HEAD, session("a", turn(1)), session("b", turn(1), parent="a", turn=1)], "line 3 .*no turn 1"),
    ],
)
def test_what_cannot_be_is_named_by_its_line(lines: list[object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_sessions("t", encoded(*lines))


def test_the_recorded_sessions_are_whole() -> None:
    paths = sorted(DATA.glob("*.jsonl.gz"))
    assert len(paths) == 9
    assert all(map(is_session_file, paths))
    read = read_sessions(DATA / "sessions-32-s1.jsonl.gz")
    mains = [each for each in read.sessions if each.parent is None]
    assert (len(mains), len(read.sessions)) == (81, 111)
    assert sum(len(each.turns) for each in read.sessions) == 2991
    assert {each.lane for each in mains} == set(range(32))
