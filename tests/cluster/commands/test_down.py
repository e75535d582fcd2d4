"""How a cluster is ended, and a Ray cluster without a token refused."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.commands.down import take_down
from cluster.commands.ray_token import METHOD, refuse_open
from cluster.errors import ClusterError
from cluster.local.processes import MARK
from cluster.local.run_directory import RunDirectory

OWNER = """
import signal, sys, time
from pathlib import Path
from cluster.local.run_directory import RunDirectory

signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, 0.01))
signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
try:
    with RunDirectory(Path(sys.argv[1])).claim():
        print("claimed", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # an interpreter takes a moment to end
    print("ended", flush=True)
"""


def test_a_cluster_that_gives_its_directory_back_ends_by_itself(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={MARK: str(directory.path)},
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "claimed\n"
        assert take_down(directory) == f"The cluster in {directory.path} is stopped."
        assert (process.stdout.read(), process.wait(30)) == ("ended\n", 0)


@contextmanager
def control_service(*, token: str | None) -> Iterator[str]:
    """As Ray's does it: whoever asks shows the token in the metadata, or is turned away."""

    def answer(request: bytes, context: Any) -> bytes:
        if (
            token is not None
            and dict(context.invocation_metadata()).get("authorization") != f"Bearer {token}"
        ):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    service, _, name = METHOD.strip("/").partition("/")
    handler = grpc.unary_unary_rpc_method_handler(answer)
    with ThreadPoolExecutor() as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def test_a_ray_cluster_that_lets_everybody_in_is_refused() -> None:
    with control_service(token=None) as address, pytest.raises(ClusterError, match="asks for no token"):
        refuse_open(address)


def test_one_that_turns_strangers_away_is_not() -> None:
    with control_service(token="5e" * 32) as address:
        refuse_open(address)


def test_one_that_answers_nothing_is_no_refusal_of_strangers(free_port: int) -> None:
    with pytest.raises(ClusterError, match="--without-token"):
        refuse_open(f"127.0.0.1:{free_port}")
