"""The picker in a process, over TLS, or not loaded."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from replicas.process.settings import SettingsError
from replicas.process.tls import TlsFiles
from router.config import RouterConfig
from router.picker.server import Picker
from tests.certificates import REPLICA_NAME, Authority, copied
from tests.router.picker.conftest import picking_fleet
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


NAME = [("grpc.ssl_target_name_override", REPLICA_NAME)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mounted"


def settings(ca: Authority, folder: Path) -> Mapping[str, str]:
    """Settings with a new certificate of the CA in the folder."""
    pair = ca.replica()
    files = copied(TlsFiles(pair.certificate, pair.key, None), folder)
    assert files.certificate is not None and files.key is not None
    return {"picker_tls_certificate": files.certificate, "picker_tls_key": files.key}


def channel_to(port: int, ca: Authority | None) -> grpc.aio.Channel:
    address = f"127.0.0.1:{port}"
    if ca is None:
        return grpc.aio.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(Path(ca.certificate).read_bytes())
    return grpc.aio.secure_channel(address, credentials, options=NAME)


async def is_served(port: int, ca: Authority | None) -> bool:
    """Whether a gateway that believes this CA is answered; None: one without TLS."""
    async with channel_to(port, ca) as channel:
        try:
            answer: bytes = await channel.unary_unary("/grpc.health.v1.Health/Check")(field(1, b"liveness"))
            return answer == b"\x08\x01"
        except grpc.aio.AioRpcError:
            return False


async def test_gateways_that_believe_the_certificate_are_served(tmp_path: Path, folder: Path) -> None:
    ca, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    async with picking_fleet(**settings(ca, folder)) as picking:
        port = picking.picker.port
        assert await is_served(port, ca)
        assert not await is_served(port, other)
        assert not await is_served(port, None)
        settings(other, folder)
        assert await is_served(port, other) and not await is_served(port, ca)
        (folder / "tls.crt").write_text("no certificate")
        assert await is_served(port, other), "a broken renewal changes nothing"


async def test_wrong_files_are_named(tmp_path: Path, folder: Path) -> None:
    chosen = settings(Authority(tmp_path / "ca"), folder)

    async def bind() -> None:
        picker = Picker(
            lambda scope, receive, send: None, RouterConfig(picker_port=0, **chosen), lambda: True
        )
        await picker.bind()

    (folder / "tls.key").write_text("no key")
    with pytest.raises(SettingsError, match=r"tls\.key holds no key in PEM form"):
        await bind()
    (folder / "tls.crt").unlink()
    with pytest.raises(SettingsError, match=r"cannot read .*tls\.crt: No such file"):
        await bind()
    with pytest.raises(SettingsError, match="picker_tls_certificate and picker_tls_key go together"):
        RouterConfig(picker_tls_key="a.key")


def test_a_router_without_a_picker_port_does_not_load_the_picker() -> None:
    code = (
        "import random, sys\n"
        "from router.assembly import Router\n"
        "from router.config import RouterConfig\n"
        "import router.__main__\n"
        "router = Router(RouterConfig(), rng=random.Random())\n"
        "assert router.picker is None\n"
        "print([name for name in sys.modules if 'picker' in name or name == 'router.dispatch.pick'])\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
