"""What Prometheus is told to scrape: whoever serves metrics now, and nobody who has ended."""

from dataclasses import replace

from cluster.local.run_directory import ClusterState, ReplicaEntry
from cluster.local.scrape_targets import scrape_targets

STATE = ClusterState(
    pid=1,
    redis_url="redis://127.0.0.1:1/0",
    redis_pid=2,
    ray_address="127.0.0.10:5",
    router_url="http://127.0.0.1:8000",
    router_pid=3,
    block_size=16,
    ready=True,
)


def test_a_router_alone_is_a_target() -> None:
    assert scrape_targets(STATE) == [
        {"targets": ["127.0.0.1:8000"], "labels": {"job": "kvasir-router", "router": "127.0.0.1:8000"}}
    ]


def test_several_routers_are_a_target_each_and_their_common_port_is_none() -> None:
    state = replace(STATE, router_admins=("127.0.0.1:9101", "127.0.0.1:9102"))
    assert [group["targets"] for group in scrape_targets(state)] == [["127.0.0.1:9101"], ["127.0.0.1:9102"]]


def test_replicas_and_controller_are_targets_for_as_long_as_they_serve_metrics() -> None:
    entries = (
        ReplicaEntry("small-pool-0", "ready", 5, "127.0.0.1:9", "e1", "127.0.0.1:19"),
        ReplicaEntry("small-pool-1", "draining", 5, "127.0.0.1:10", "e1", "127.0.0.1:20"),
        ReplicaEntry("small-pool-2", "stopped", 5, "127.0.0.1:11", "e1", "127.0.0.1:21"),
        ReplicaEntry("small-pool-3", "starting", None, None, None),
    )
    _, controller, *replicas = scrape_targets(
        replace(STATE, replicas=entries, controller_metrics="127.0.0.1:7")
    )
    assert controller == {"targets": ["127.0.0.1:7"], "labels": {"job": "kvasir-controller"}}
    assert [group["targets"] for group in replicas] == [["127.0.0.1:19"], ["127.0.0.1:20"]]
    assert replicas[0]["labels"] == {
        "job": "kvasir-replica",
        "replica": "small-pool-0",
        "pool": "small-pool",
    }
