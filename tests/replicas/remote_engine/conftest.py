import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.toy_model import checkpoint_directory
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


@pytest.fixture
def model_that_says(tmp_path: Path) -> Path:
    """The toy model, with sampling defaults."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_directory(None), folder)
    path = folder / "generation_config.json"
    fields = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**fields, "temperature": 0.25, "max_new_tokens": 9}), "utf-8")
    return folder
