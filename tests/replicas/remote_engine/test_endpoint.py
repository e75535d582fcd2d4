"""The address by which gateways reach a server, as its replica's card has it."""

import pytest

from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from replicas.remote_engine.engine import RemoteEngine
from replicas.remote_engine.server import address_of
from tests.replicas.remote_engine.stand_in import StandIn


@pytest.mark.parametrize(
    ("url", "configured", "endpoint"),
    [
        ("http://10.0.0.7:8000", None, "10.0.0.7:8000"),
        ("http://10.0.0.7:8000/", None, "10.0.0.7:8000"),
        ("http://10.0.0.7:8000/prefix", None, ""),
        ("http://10.0.0.7:8000/prefix", "10.0.0.7:9000", "10.0.0.7:9000"),
        ("http://10.0.0.7", None, "10.0.0.7:80"),
        ("https://10.0.0.7", None, "10.0.0.7:443"),
        ("http://[fd00::7]:8000", None, "[fd00::7]:8000"),
        ("http://127.0.0.1:8000", None, ""),
        ("http://localhost:8000", None, ""),
        ("http://127.0.0.1:8000", "10.0.0.7:8000", "10.0.0.7:8000"),
    ],
)
def test_an_address_is_that_of_the_url_unless_it_is_loopback_or_below_a_path(
    url: str, configured: str | None, endpoint: str
) -> None:
    assert address_of(url, configured) == endpoint


def test_an_address_is_host_and_port() -> None:
    with pytest.raises(SettingsError, match="engine_endpoint"):
        ReplicaConfig(engine="remote", engine_url="http://a:1", engine_endpoint="http://a:1")


def test_a_card_has_the_address_and_the_rank(server: StandIn) -> None:
    engine = RemoteEngine(
        ReplicaConfig(engine="remote", engine_url=server.url, engine_rank=0, engine_endpoint="10.0.0.7:8000")
    )
    assert (engine.card.endpoint, engine.card.endpoint_rank) == ("10.0.0.7:8000", 0)
    engine.close()


def test_a_server_without_an_address_for_gateways_is_named_in_the_log(
    server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = RemoteEngine(ReplicaConfig(engine="remote", engine_url=server.url))
    assert engine.card.endpoint == ""
    assert f"gateways cannot send requests to the server: {server.url} is on loopback" in caplog.text
    engine.close()


def test_a_server_that_has_the_model_under_another_name_gets_no_requests_of_gateways(
    server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RemoteEngine(
        ReplicaConfig(
            engine="remote", engine_url=server.url, model_name="ours", engine_endpoint="10.0.0.7:8000"
        )
    )
    assert engine.card.endpoint == ""
    assert "clients ask for ours" in caplog.text
    engine.close()
