"""The picker of a router process: its port, and its end."""

import re
import signal
import socket
import subprocess
import sys

import grpc

from tests.router.picker.gateway import field

_PICKER = re.compile(r"gateways are served on 127\.0\.0\.1:(\d+)")


def command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "router", "--port=0", "--redis-url=redis://127.0.0.1:1/0"),
        f"--picker-port={port}",
    ]


def test_a_router_says_where_gateways_find_it_and_ends_in_order() -> None:
    with subprocess.Popen(command(0), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = next(found[1] for line in process.stderr if (found := _PICKER.search(line)))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(field(1, b"liveness"), timeout=30) == b"\x08\x01"
            assert check(b"", timeout=30) == b"\x08\x02"
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=50)
    assert process.returncode == 0, log


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(command(port), capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 2
    assert f"the router cannot listen on 127.0.0.1 port {port} for gateways" in ended.stderr


def test_without_keys_gateways_are_served_on_loopback_alone() -> None:
    ended = subprocess.run(
        [*command(0), "--picker-host=0.0.0.0"], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 2 and "does not listen on 0.0.0.0" in ended.stderr
