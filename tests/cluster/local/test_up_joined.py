"""`kvasir up` in front of servers that run already and come, go and change while it runs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from replicas.toy_model import checkpoint_directory
from tests.cluster.kvasir_command import KvasirCommand, wait_until
from tests.replicas.remote_engine.stand_in import SERVED_NAME, StandIn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@contextmanager
def servers(number: int) -> Iterator[list[StandIn]]:
    running = [StandIn() for _ in range(number)]
    try:
        yield running
    finally:
        for server in running:
            server.close()


def id_of(server: StandIn) -> str:
    return f"server_at_127.0.0.1-{server.port}-0"


def ready(command: KvasirCommand) -> dict[str, str | None]:
    """The epoch of each."""
    return {
        replica.replica_id: replica.epoch for replica in command.state().replicas if replica.state == "ready"
    }


def answer(command: KvasirCommand, model: str) -> httpx.Response:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"{command.state().router_url}/v1/chat/completions"
    return httpx.post(url, json=body, trust_env=False, timeout=60)


def test_servers_in_a_file_come_and_go_while_it_runs(tmp_path: Path) -> None:
    command, file = KvasirCommand(tmp_path / "run"), tmp_path / "servers"
    said = (tmp_path / "up.out").read_text

    def becomes(*expected: StandIn) -> None:
        wait_until(lambda: ready(command).keys() == set(map(id_of, expected)), said, 60)

    def listed(*named: StandIn) -> None:
        file.write_text("".join(f"{server.url}\n" for server in named))

    with servers(4) as (a, b, c, silent):
        silent.close()
        listed(a, b, silent)
        with command.up("--join-file", str(file), "--model", str(checkpoint_directory(None))):
            assert "2 ready" in said()
            assert answer(command, SERVED_NAME).headers["x-kvasir-replica"] in (id_of(a), id_of(b))
            wait_until(lambda: f"{silent.url} cannot be joined yet" in said(), said)
            listed(a, b, c)
            becomes(a, b, c)
            listed(a, c)
            becomes(a, c)
            found = "servers of pool server: 127.0.0.1"
            num_told = said().count(found)
            epochs = ready(command)
            os.kill(command.pid_of("ray::FleetController"), signal.SIGKILL)
            wait_until(lambda: said().count(found) > num_told, said)
            becomes(a, c)
            assert ready(command) == epochs
            file.unlink()
            wait_until(lambda: "the 2 known before stay" in said(), said)
            assert answer(command, SERVED_NAME).status_code == 200
            c.served_name, c.started_at = "another", c.started_at + 1
            c.restart_events()
            wait_until(lambda: answer(command, "another").status_code == 200, said, 60)
            assert answer(command, "another").headers["x-kvasir-replica"] == id_of(c)
            assert answer(command, SERVED_NAME).headers["x-kvasir-replica"] == id_of(a)


def test_a_given_server_that_does_not_answer_is_told_before_anything_starts(tmp_path: Path) -> None:
    command = KvasirCommand(tmp_path / "run")
    with servers(1) as (a,):
        a.close()
        for words in (["--join", a.url], ["--join-file", str(tmp_path / "none")]):
            done = command.run("up", *words)
            assert done.returncode == 2
            assert "does not answer" in done.stderr or "cannot be read" in done.stderr
            assert done.stdout == ""
