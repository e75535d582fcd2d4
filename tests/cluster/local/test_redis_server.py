import asyncio
import os
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cluster.errors import StartFailed
from cluster.local import redis_server
from cluster.local.redis_server import PrivateRedis, redis_binary


async def test_a_private_redis_serves_and_comes_back_empty_at_its_socket(tmp_path: Path) -> None:
    server = await asyncio.to_thread(PrivateRedis, tmp_path, tmp_path / "log", {})
    await server.start()
    try:
        async with Redis.from_url(server.url, protocol=2) as client:
            await client.set("key", "value")
        await server.service.stop(5)
        await server.start()
        async with Redis.from_url(server.url, protocol=2) as client:
            assert await client.get("key") is None
    finally:
        await server.service.stop(5)
    left = set(await asyncio.to_thread(os.listdir, tmp_path))
    assert left <= {"log", "redis.sock"}, "nothing is kept on disk"


def test_without_the_package_the_machines_own_redis_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)
    own = tmp_path / "redis-server"
    own.touch(mode=0o755)
    assert redis_binary({"PATH": str(tmp_path)}) == str(own)


def test_without_any_redis_one_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartFailed, match="set REDIS_URL, or install"):
        redis_binary({"PATH": str(tmp_path)})
