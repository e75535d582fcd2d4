"""The picker's port with TLS: its certificate, renewals of it, and files that are wrong."""

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
