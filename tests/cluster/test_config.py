from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.config import BackoffSpec, EngineSource, FleetSpec, FoundServer, PoolSpec, base_name, pool_of_id
from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from replicas.protocol.bounds import checked_id
from replicas.protocol.status import ReplicaId
from tests.cluster.finding import finding


def test_replicas_are_named_after_their_pool() -> None:
    spec = FleetSpec((PoolSpec(2), PoolSpec(1, name="large-ones")))
    assert spec.pools[1].replica_id(7) == "large-ones-7"
    assert spec.pool_of(ReplicaId("large-ones-7")) is spec.pools[1]
    assert spec.pool_of(ReplicaId("small-7")) is None


def test_the_replicas_of_a_pool_differ_in_their_id_only() -> None:
    pool = PoolSpec(2, replica=ReplicaConfig(model_name="m", block_size=32))
    first, second = (pool.config_of(replica_id) for replica_id in map(pool.replica_id, range(2)))
    assert (first.replica_id, second.replica_id) == ("replica-0", "replica-1")
    assert first.block_size == second.block_size == 32
    assert first.kv_folder is second.kv_folder is None


def test_each_replica_has_a_folder_of_its_own_for_kv() -> None:
    pool = PoolSpec(2, replica=ReplicaConfig(kv_folder="/srv/kv"))
    folders = [pool.config_of(pool.replica_id(number)).kv_folder for number in range(2)]
    assert folders == ["/srv/kv/replica-0", "/srv/kv/replica-1"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PoolSpec(-1), "cannot have -1 replicas"),
        (lambda: PoolSpec(1, name="a b"), "cannot be named 'a b'"),
        (lambda: PoolSpec(1, name=""), "cannot be named ''"),
        (lambda: PoolSpec(1, num_cpus=-0.1), "a negative number of CPUs"),
        (lambda: PoolSpec(1, num_gpus=1.5), "only whole ones"),
        (lambda: PoolSpec(1, num_threads=0), "at least one thread"),
        (lambda: FleetSpec((PoolSpec(1), PoolSpec(2))), "two pools have the same name"),
        (lambda: FleetSpec((PoolSpec(1),), drain_seconds=-1), "cannot be negative"),
        (lambda: BackoffSpec(initial_seconds=0), "initial_seconds"),
        (lambda: BackoffSpec(initial_seconds=2, max_seconds=1), "initial_seconds"),
        (lambda: BackoffSpec(healthy_seconds=-1), "cannot be negative"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_with_a_sentence(make, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match=sentence):
        make()


def test_a_replica_on_several_gpus_asks_for_one_machine_or_for_a_bundle_each() -> None:
    pool = PoolSpec(1, num_cpus=4, num_gpus=2, custom_resources={"slot": 1})
    assert pool.bundles() == ({"CPU": 4, "GPU": 2, "slot": 1},)
    assert replace(pool, bundle="gpu").bundles() == ({"CPU": 2, "GPU": 1, "slot": 1}, {"CPU": 2, "GPU": 1})


def test_a_replica_without_a_gpu_asks_for_one_bundle() -> None:
    assert PoolSpec(1, num_cpus=0.1).bundles() == ({"CPU": 0.1},)


def test_the_first_death_is_repaired_at_once_and_later_ones_ever_more_slowly() -> None:
    backoff = BackoffSpec(initial_seconds=0.5, max_seconds=3)
    assert [backoff.delay_seconds(deaths) for deaths in range(7)] == [0, 0, 0.5, 1, 2, 3, 3]
    assert backoff.delay_seconds(10_000) == 3


@dataclass(frozen=True)
class LaterConfig(ReplicaConfig):
    """As of a version that has one setting more."""

    fresh: int = 3


def test_a_version_with_more_settings_makes_no_replica_anew() -> None:
    adapters = {"sql": "/adapters/sql", "law": "/adapters/law"}
    now = PoolSpec(2, replica=ReplicaConfig(engine="vllm", max_running=9, adapters=adapters))
    later = PoolSpec(2, replica=LaterConfig(engine="vllm", max_running=9, adapters=adapters))
    assert now.revision == later.revision
    assert FleetSpec((now,)).revision == FleetSpec((later,)).revision
    changed = PoolSpec(2, replica=LaterConfig(engine="vllm", max_running=9, adapters=adapters, fresh=4))
    assert changed.revision != later.revision
    assert FleetSpec((changed,)).revision != FleetSpec((later,)).revision


def test_the_order_in_a_file_means_nothing() -> None:
    a = PoolSpec(1, "a", ReplicaConfig(engine="vllm", engine_args={"x": [1, 2], "y": {"p": 1, "q": None}}))
    b = PoolSpec(1, "b", custom_resources={"slot": 1, "disk": 2})
    other_a = PoolSpec(
        1, "a", ReplicaConfig(engine="vllm", engine_args={"y": {"q": None, "p": 1}, "x": [1, 2]})
    )
    other_b = PoolSpec(1, "b", custom_resources={"disk": 2, "slot": 1})
    assert (a.revision, b.revision) == (other_a.revision, other_b.revision)
    assert FleetSpec((a, b)).revision == FleetSpec((other_b, other_a)).revision
    swapped = PoolSpec(
        1, "a", ReplicaConfig(engine="vllm", engine_args={"x": [2, 1], "y": {"p": 1, "q": None}})
    )
    assert swapped.revision != a.revision


@pytest.mark.parametrize(
    ("change", "is_another_kind_of_replica"),
    [
        ({"num_replicas": 3}, False),
        ({"drain_seconds": 7.0}, False),
        ({"surge": 0}, False),
        ({"num_cpus": 2.0}, True),
        ({"num_gpus": 1.0}, True),
        ({"num_threads": 2}, True),
        ({"custom_resources": {"slot": 1}}, True),
        ({"bundle": "gpu"}, True),
        ({"is_on_node_address": True}, True),
        ({"num_restarts": 1}, True),
        ({"replica": ReplicaConfig(max_running=7)}, True),
    ],
)
def test_every_change_is_another_spec_and_some_are_another_kind_of_replica(
    change: dict[str, Any], is_another_kind_of_replica: bool
) -> None:
    pool = PoolSpec(1)
    changed = replace(pool, **change)
    assert (changed.revision != pool.revision) is is_another_kind_of_replica
    assert FleetSpec((changed,)).revision != FleetSpec((pool,)).revision


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1-8000"),
        ("http://vllm.example", "vllm.example"),
        ("http://vllm.example/a/b", "vllm.example-a-b"),
    ],
)
def test_a_server_that_was_found_names_its_replicas(url: str, name: str) -> None:
    assert FoundServer(url).name == name
    assert FoundServer(url, 1).name == f"{name}-rank1"


def test_servers_have_different_names_where_their_addresses_are_alike() -> None:
    urls = ["http://[fd00::1:2]:8000", "http://[fd00:1::2]:8000", "http://a_b:1", "http://a-b:1"]
    urls.append("https://a-b:1")
    urls += [f"http://{'a' * 60}{end}:8000" for end in "xy"]
    names = {FoundServer(url).name for url in urls}
    assert len(names) == len(urls)
    pool = finding("p" * 63)
    for url in urls:
        (member,) = FleetSpec((pool,)).with_servers({pool.name: [FoundServer(url, 7)]}).pools
        assert checked_id(member.replica_id(0)) == member.replica_id(0)


def test_a_pool_that_finds_servers_has_a_replica_for_each() -> None:
    pool = finding("p")
    spec = FleetSpec((PoolSpec(1), pool))
    assert spec.with_servers({}) == spec, "it has not looked yet"
    assert spec.with_servers({"p": []}).pools == (PoolSpec(1),)
    found = spec.with_servers({"p": [FoundServer("http://a:1"), FoundServer("http://b:1", 1)]})
    assert [one.name for one in found.pools] == ["replica", "p_at_a-1", "p_at_b-1-rank1"]
    assert {one.num_replicas for one in found.pools} == {1}
    second = found.pools[2]
    assert (second.replica.engine_url, second.replica.engine_rank) == ("http://b:1", 1)
    assert second.revision != found.pools[1].revision
    assert found.pool_of(ReplicaId("p_at_b-1-rank1-7")) == second
    assert pool_of_id(ReplicaId("p_at_b-1-rank1-7")) == base_name(second.name) == "p"


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"urls": ("http://a:1",), "file": "f"},
        *({"urls": (url,)} for url in ("a:1", "http://me:secret@a:1", "http://a:1?b", "http://a:1#b")),
        {"dns": "https://a:1"},
        {"dns": "http://a:1/b"},
        {"service": "a/b"},
        {"service": "a", "namespace": "../b"},
        {"file": "f", "namespace": "n"},
        {"inference_pool": "p", "port": "http"},
    ],
)
def test_servers_are_found_in_one_way_at_addresses(source: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        EngineSource(**source)
    assert "secret" not in str(refused.value)


def test_only_replicas_of_servers_that_run_are_found() -> None:
    with pytest.raises(SettingsError, match="so its engine is remote"):
        PoolSpec(0, engines=EngineSource(("http://a:1",)))
