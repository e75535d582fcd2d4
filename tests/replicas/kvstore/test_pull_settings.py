"""What pulls need in a replica's settings, and the sentence where that is missing."""

import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from replicas.config import ReplicaConfig
from replicas.kvstore.opening import open_store
from replicas.process.settings import SettingsError
from tests.replicas.kvstore.chunk_images import LAYOUT, PAYLOAD_BYTES

ON: dict[str, Any] = {"host_kv_bytes": 1 << 20, "pull_bytes_per_second": 1e9}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pull_bytes_per_second": 1e9}, "pull_bytes_per_second needs host_kv_bytes"),
        ({**ON, "pull_bytes_per_second": 0.0}, "pull_bytes_per_second must be above 0"),
        ({**ON, "tls_certificate": "c", "tls_key": "k"}, "pull_bytes_per_second needs tls_client_ca"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        ReplicaConfig(**settings)


@pytest.mark.parametrize("pulls", [True, False])
def test_memory_is_shared_where_replicas_pull_and_nowhere_else(pulls: bool) -> None:
    settings = ON if pulls else {**ON, "pull_bytes_per_second": None}
    store = open_store(ReplicaConfig(**settings), LAYOUT, PAYLOAD_BYTES)
    assert store is not None
    assert (store.shared is not None) == (store.speeds().pull is not None) == pulls
    assert (store.figures().pulls is not None) == pulls
    store.close()


def test_an_engine_that_does_not_pull_loads_no_grpc() -> None:
    code = """
import sys
from replicas.config import ReplicaConfig
from replicas.kvstore.opening import open_store
from tests.replicas.kvstore.chunk_images import LAYOUT
store = open_store(ReplicaConfig(host_kv_bytes=1 << 20), LAYOUT, 5000)
assert "grpc" not in sys.modules
"""
    run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
