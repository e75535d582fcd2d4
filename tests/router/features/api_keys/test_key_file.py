"""A file of keys is followed, and one that is wrong, gone or half written leaves the keys before in force."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from replicas.process.settings import SettingsError
from router.errors import KeyFault
from router.features.api_keys.key_file import KeyFile
from router.features.api_keys.keys_in_force import KeysInForce
from tests.router.features.api_keys.documents import numbered_key, yaml_of
from tests.router.raw_client import wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Followed:
    """A file, whose looks a test makes."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, Clock()
        self.keys = KeysInForce(self.clock)
        self.file = KeyFile(str(path), self.keys, look_seconds=0.01)

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            self.clock.now += 2.0
            await self.file._follow_once()

    @property
    def in_force(self) -> list[int]:
        return [
            number
            for number in range(1, 10)
            if not isinstance(self.keys.find(numbered_key(number)[1], now=0.0), KeyFault)
        ]


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    fresh = path.with_name("fresh")
    fresh.write_bytes(content)
    fresh.chmod(mode)
    fresh.replace(path)


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    write(tmp_path / "keys.yaml", yaml_of(1, 2))
    return Followed(tmp_path / "keys.yaml")


async def test_keys_come_and_go_with_the_file(followed: Followed) -> None:
    assert followed.in_force == [1, 2]
    write(followed.path, yaml_of(2, 3))
    await followed.look()
    assert followed.in_force == [2, 3]
    write(followed.path, b"keys: []")
    await followed.look()
    assert followed.in_force == []


@pytest.mark.parametrize(
    "content",
    [b"", b"keys: [", b"\xff", b"keys: []\nkeys: []", b"[\n" * 200_000, yaml_of(1, 3)[:-10], yaml_of(3) * 2],
)
async def test_a_wrong_file_changes_nothing_and_is_told_of_once(
    followed: Followed, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(followed.path, content)
    await followed.look(5)
    assert followed.in_force == [1, 2]
    statistics = followed.keys
    assert statistics.is_newest_refused
    assert statistics.age_seconds == 10.0
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    write(followed.path, yaml_of(4))
    await followed.look()
    assert followed.in_force == [4]
    statistics = followed.keys
    assert (statistics.is_newest_refused, statistics.age_seconds) == (False, 0.0)


async def test_a_file_that_is_gone_leaves_its_keys(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    content = followed.path.read_bytes()
    followed.path.unlink()
    await followed.look(4)
    assert followed.in_force == [1, 2]
    statistics = followed.keys
    assert (statistics.age_seconds, statistics.is_newest_refused) == (8.0, False)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    write(followed.path, content)
    await followed.look()
    assert followed.in_force == [1, 2]
    assert followed.keys.age_seconds == 0.0


async def test_a_wrong_file_stays_wrong_after_it_was_away(followed: Followed) -> None:
    write(followed.path, b"keys: 3")
    await followed.look()
    away = followed.path.rename(followed.path.with_name("away"))
    await followed.look()
    away.rename(followed.path)
    await followed.look()
    assert followed.keys.is_newest_refused
    assert followed.in_force == [1, 2]


async def test_a_running_router_follows_its_file(followed: Followed) -> None:
    following = asyncio.create_task(followed.file.follow())
    for content, in_force in ((yaml_of(2, 3), [2, 3]), (yaml_of(4), [4])):
        write(followed.path, content)
        await wait_for(lambda in_force=in_force: followed.in_force == in_force)
    following.cancel()


async def test_what_is_being_written_is_not_read(followed: Followed) -> None:
    """Not even a beginning that would pass for a whole document."""
    content, beginning = yaml_of(3, 4), yaml_of(3)
    with followed.path.open("wb") as file:
        file.write(beginning)
        file.flush()
        await followed.look(1)
        assert followed.in_force == [1, 2]
        file.seek(0)
        file.write(content)
        file.flush()
        await followed.look(1)
        assert followed.in_force == [1, 2]
    await followed.look(1)
    assert followed.in_force == [3, 4]


@pytest.fixture
def secret_volume(tmp_path: Path) -> Followed:
    """As the kubelet lays one out; what can be told of both versions but the inode is equal."""
    for number in (1, 2):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}/keys.yaml").write_bytes(yaml_of(number))
    os.utime(tmp_path / "..1/keys.yaml", ns=(1, 1))
    os.utime(tmp_path / "..2/keys.yaml", ns=(1, 1))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    return Followed(tmp_path / "keys.yaml")


async def test_the_symlinks_of_a_kubernetes_secret_are_followed(secret_volume: Followed) -> None:
    assert secret_volume.in_force == [1]
    folder = secret_volume.path.parent
    (folder / "..new").symlink_to("..2")
    (folder / "..new").rename(folder / "..data")
    await secret_volume.look()
    assert secret_volume.in_force == [2]


@pytest.mark.parametrize(
    ("mode", "is_warned"), [(0o600, False), (0o440, False), (0o644, True), (0o620, True), (0o604, True)]
)
async def test_a_file_that_others_may_read_is_warned_of_once(
    followed: Followed, mode: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (3, 4):
        write(followed.path, yaml_of(number), mode)
        await followed.look()
    assert followed.in_force == [4]
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == is_warned


@pytest.mark.parametrize("content", [None, b"", b"keys: {}"])
def test_a_router_does_not_begin_without_whole_keys(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"^the file of keys .*keys\.yaml (is wrong|cannot be read): "):
        KeyFile(str(path), KeysInForce(Clock()))
