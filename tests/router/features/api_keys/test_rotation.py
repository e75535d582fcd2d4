"""Keys come and go while a router answers: over HTTP, from a file that it follows."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from router.features.api_keys.key_file import KeyFile
from router.features.api_keys.keys_in_force import KeysInForce
from tests.router import tiny_model
from tests.router.features.api_keys.documents import numbered_key, yaml_of
from tests.router.http_server import http_server

Status = Callable[[int], Awaitable[int]]

CHAT = {"model": tiny_model.MODEL, "messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "keys.yaml").write_bytes(yaml_of(1, 2))
    return tmp_path / "keys.yaml"


@pytest.fixture
def file(path: Path) -> tuple[KeysInForce, KeyFile]:
    keys = KeysInForce(lambda: 0.0)
    return keys, KeyFile(str(path), keys, look_seconds=0.01)


@contextlib.asynccontextmanager
async def following(keys: KeysInForce, file: KeyFile) -> AsyncIterator[Status]:
    """What a router says to the key of that number."""
    async with http_server(keys=keys) as server, httpx.AsyncClient(base_url=server.url) as client:

        async def status(number: int) -> int:
            headers = {"authorization": f"Bearer {numbered_key(number)[1]}"}
            return (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code

        task = asyncio.create_task(file.follow())
        yield status
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_keys_are_rotated_without_a_restart(path: Path, file: tuple[KeysInForce, KeyFile]) -> None:
    async with following(*file) as status:
        assert [await status(number) for number in (1, 2, 3)] == [200, 200, 401]
        await asyncio.to_thread(path.write_bytes, yaml_of(2, 3))
        while await status(3) != 200:
            pass
        assert [await status(number) for number in (1, 2, 3)] == [401, 200, 200]


async def test_a_wrong_file_lets_in_whom_the_one_before_let_in(
    path: Path, file: tuple[KeysInForce, KeyFile]
) -> None:
    keys, follower = file
    async with following(keys, follower) as status:
        await asyncio.to_thread(path.write_bytes, yaml_of(2, 3)[:-20])
        while not keys.is_newest_refused:
            assert await status(1) == 200
        assert [await status(number) for number in (1, 2, 3)] == [200, 200, 401]
