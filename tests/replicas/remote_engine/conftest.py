from collections.abc import Iterator

import pytest

from tests.replicas.remote_engine.sglang_stand_in import SglangStandIn
from tests.replicas.remote_engine.stand_in import StandIn


@pytest.fixture(params=[1, 16, 64])
def sglang(request: pytest.FixtureRequest) -> Iterator[SglangStandIn]:
    server = SglangStandIn(request.param)
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()
