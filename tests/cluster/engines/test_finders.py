from pathlib import Path

import pytest

from cluster.config import EngineSource
from cluster.engines import finders
from cluster.engines.finders import SourceFailed, finder_of


async def test_a_list_names_what_was_given() -> None:
    assert await finder_of(EngineSource(("http://a:1/", "http://b:1"))).look() == {"http://a:1", "http://b:1"}


async def test_a_file_is_read_at_each_look(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    finder = finder_of(EngineSource(file=str(file)))
    with pytest.raises(SourceFailed, match="No such file"):
        await finder.look()
    file.write_text("# ours\nhttp://a:1\n\n  http://b:1/  \n")
    assert await finder.look() == {"http://a:1", "http://b:1"}
    file.write_text("http://c:1")
    assert await finder.look() == {"http://c:1"}
    file.write_text("")
    assert await finder.look() == set()


@pytest.mark.parametrize("content", [b"http://a:1\nnonsense\n", b"\xff", b"http://a:99999", b"http://a b:1"])
async def test_a_file_with_anything_else_in_it_fails_as_a_whole(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "servers"
    file.write_bytes(content)
    with pytest.raises(SourceFailed, match="servers"):
        await finder_of(EngineSource(file=str(file))).look()


async def test_an_endless_file_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finders, "MOST_FILE_BYTES", 100)
    file = tmp_path / "servers"
    file.write_text("#" * 101)
    with pytest.raises(SourceFailed, match="longer than"):
        await finder_of(EngineSource(file=str(file))).look()
