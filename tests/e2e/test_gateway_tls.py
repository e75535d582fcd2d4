"""A real Envoy that speaks TLS to the picker."""

from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority
from tests.envoy_server import Envoy
from tests.router.picker.conftest import picking_fleet

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


async def test_an_envoy_that_believes_the_ca_asks_over_tls(tmp_path: Path) -> None:
    ca, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    pair = ca.replica()
    settings = {"picker_tls_certificate": pair.certificate, "picker_tls_key": pair.key}
    async with picking_fleet(**settings) as picking, httpx.AsyncClient(trust_env=False) as http:
        for believed, status in ((ca, 200), (other, 500), (None, 500)):
            envoy = Envoy(picking.picker.port, picker_ca=None if believed is None else believed.certificate)
            folder = tmp_path / f"envoy-{status}-{believed is None}"
            folder.mkdir()
            with envoy.running(folder):
                answer = await http.get(f"{envoy.url}/v1/models")
                assert answer.status_code == status, answer.text
