"""LlamaServer: a real llama.cpp server with the toy model, in a process that can be killed."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from loadtests.stacks.local_stack import free_port

START_SECONDS = 60.0
_PROCESS = Path(__file__).with_name("llama_process.py")


class LlamaServer:
    """`num_slots` requests run at a time, each in a context of its own. `num_threads` answer HTTP; a stream
    has one until its end."""

    def __init__(self, model: Path, *, num_slots: int = 2, num_threads: int = 8) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = model.with_name(f"llama-{self.port}.log")
        words = [model, self.port, num_slots, num_threads]
        self._command = [sys.executable, "-P", str(_PROCESS), *map(str, words)]
        self.start()

    def start(self) -> None:
        """Start it, or start it again, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text("utf-8")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def ask(self, path: str, body: Any = None) -> httpx.Response:
        """Ask it without a router between."""
        if body is None:
            return httpx.get(self.url + path, timeout=60)
        return httpx.post(self.url + path, json=body, timeout=60)

    def num_running(self) -> int:
        return sum(slot["is_processing"] for slot in self.ask("/slots").json())

    def metric(self, name: str) -> float:
        lines = self.ask("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"llamacpp:{name} "))
