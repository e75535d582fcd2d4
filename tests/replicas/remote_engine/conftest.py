from collections.abc import Iterator

import pytest

from tests.replicas.remote_engine.stand_in import StandIn


@pytest.fixture
def server() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()
