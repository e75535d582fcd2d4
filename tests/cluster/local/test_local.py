"""What `kvasir up` tells the router of the replicas' settings."""

from cluster.local.local_cluster import _shared_settings
from replicas.config import ReplicaConfig
from replicas.process.settings import load_settings
from router.config import RouterConfig


def test_how_replicas_log_and_where_they_send_traces_holds_for_the_router_too() -> None:
    replica = ReplicaConfig(
        log_format="json", log_level="debug", otlp_endpoint="http://collector:4318", trace_sample_ratio=0.25
    )
    router = load_settings(
        RouterConfig,
        arguments=_shared_settings(replica),
        environment={},
        prefix="X_",
        program="router",
        description="",
    )
    assert (router.log_format, router.log_level) == ("json", "debug")
    assert (router.otlp_endpoint, router.trace_sample_ratio) == ("http://collector:4318", 0.25)


def test_what_is_not_set_is_left_to_the_routers_own_environment() -> None:
    assert _shared_settings(ReplicaConfig()) == []
