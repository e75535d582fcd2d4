from collections.abc import Iterator

import pytest

from tests.replicas.openai_engine.text_server import TextServer


@pytest.fixture
def server() -> Iterator[TextServer]:
    server = TextServer()
    yield server
    server.close()
