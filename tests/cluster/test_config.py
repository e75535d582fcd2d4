"""Specs of fleets and the fleet file: what they may say, and the one sentence for everything else."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import (
    AutoscaleSpec,
    BackoffSpec,
    EngineSource,
    FleetSpec,
    FoundServer,
    PoolSpec,
    base_name,
    pool_of_id,
)
from cluster.fleet_file import model_name, parse_fleet
from cluster.role_complaints import role_complaints
from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from replicas.protocol.bounds import checked_id
from replicas.protocol.status import ReplicaId
from tests.cluster.finding import finding


def test_each_replica_has_a_folder_of_its_own_for_kv() -> None:
    pool = PoolSpec(2, replica=ReplicaConfig(kv_folder="/srv/kv"))
    folders = [pool.config_of(pool.replica_id(number)).kv_folder for number in range(2)]
    assert folders == ["/srv/kv/replica-0", "/srv/kv/replica-1"]


def test_a_replica_on_several_gpus_asks_for_one_machine_or_for_a_bundle_each() -> None:
    pool = PoolSpec(1, num_cpus=4, num_gpus=2, custom_resources={"slot": 1})
    assert pool.bundles() == ({"CPU": 4, "GPU": 2, "slot": 1},)
    assert replace(pool, bundle="gpu").bundles() == ({"CPU": 2, "GPU": 1, "slot": 1}, {"CPU": 2, "GPU": 1})


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


EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "fleet.yaml"
REDIS = "redis://127.0.0.1:6379/0"


def pool(**fields: Any) -> dict[str, Any]:
    return {"name": "small", "settings": {"model": "/models/small"}, **fields}


def text(*pools: Any, **fields: Any) -> str:
    return yaml.safe_dump({"redis_url": REDIS, "pools": list(pools), **fields})


def test_the_example_is_a_fleet_of_two_models_in_three_pools() -> None:
    spec = parse_fleet(EXAMPLE.read_text())
    assert [(pool.name, model_name(pool.replica)) for pool in spec.pools] == [
        ("large", "large"),
        ("small", "small"),
        ("small-spare", "small"),
    ]
    assert spec.pools[1].autoscaling == AutoscaleSpec(1, 4, 16, 20_000)


def test_the_example_of_roles_can_be_had_by_taking_its_comments_off() -> None:
    _, _, example = EXAMPLE.read_text().partition("  # Two pools of one model, of which")
    lines = (line for line in example.splitlines() if line.startswith(("  # -", "  #   ")))
    pools = "\n".join(line.removeprefix("  # ") for line in lines)
    spec = parse_fleet(f"redis_url: {REDIS}\npools:\n{pools}")
    assert [(each.name, each.replica.role, each.replica.max_batched_tokens) for each in spec.pools] == [
        ("prefill", "prefill", 8192),
        ("decode", "decode", 512),
    ]
    assert role_complaints(spec) == []


def test_a_pool_whose_server_names_its_model_is_no_pool_of_the_toy_model() -> None:
    by_server = pool(name="b", engines={"urls": ["http://a:1"]}, settings={"engine": "openai"})
    parse_fleet(text(pool(settings={"model": "/models/toy_model"}), by_server))


def test_all_pools_have_the_fleets_secret_file_and_none_without_one() -> None:
    spec = parse_fleet(text(pool(), pool(name="b"), secret_file="/etc/kvasir/secret"))
    assert [each.replica.secret_file for each in spec.pools] == ["/etc/kvasir/secret"] * 2
    assert spec.secret_file == "/etc/kvasir/secret"
    assert parse_fleet(text(pool())).secret_file is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[", "not YAML"),
        ("- a", "not a mapping"),
        (text(), "needs pools"),
        (yaml.safe_dump({"pools": [pool()]}), "no redis_url"),
        (text(pool(), redis_url="http://x"), "redis_url begins with"),
        (text(pool(), pool()), "two pools have the same name: small"),
        (text(pool(), drain_second=3), "unknown field drain_second; did you mean drain_seconds"),
        (text(pool(), ray_autoscaler="yes please"), "takes true or false"),
        (text(pool(), metrics_port=70_000), "metrics_port of the fleet file cannot be 70000"),
        (text({"settings": {"model": "toy"}}), "pool number 1 of the fleet file has no name"),
        (text(pool(name="a b")), "a pool cannot be named 'a b'"),
        (text({"name": "small"}), "pool small has no model"),
        (text(pool(settings={"engine": "vllm"})), "pool small has no model"),
        (text(pool(settings={"model": "toy", "model_aliases": ["a\nb"]})), "at most 4096 names of 1 to 512"),
        (text(pool(settings={"model": "toy", "replica_id": "x"})), "cannot set replica_id"),
        (text(pool(settings={"model": "toy", "secret": "ab" * 16})), "give secret_file, beside the pools"),
        (text(pool(), secret_file=3), "secret_file of the fleet file cannot be 3; it takes text"),
        (text(pool(replicas=-1)), "replicas of pool small cannot be -1"),
        (text(pool(replica=2)), "pool small has an unknown field replica; did you mean replicas"),
        (text(pool(resources={"cpus": float("nan")})), "not a number"),
        (text(pool(resources={"cpus": 0})), "must ask for some"),
        (text(pool(resources={"custom": {"GPU": 1}})), "cannot have a custom resource named 'GPU'"),
        (text(pool(resources={"custom": ["slot"]})), "custom resources of pool small are a mapping"),
        (text(pool(resources={"bundle": "rack"})), "bundle of pool small is machine or gpu"),
        (text(pool(autoscaling={"max": 2})), "autoscaling of pool small needs min and max"),
        (text(pool(autoscaling={"min": 1, "max": 2})), "needs target_in_flight or target_pending_tokens"),
        (
            text(pool(autoscaling={"min": 3, "max": 2, "target_in_flight": 1})),
            "autoscaling of pool small: autoscaling needs 1 <= min <= max",
        ),
        (
            text(pool(replicas=5, autoscaling={"min": 1, "max": 2, "target_in_flight": 1})),
            "has 5 replicas, and its autoscaling keeps 1 to 2",
        ),
        (
            text(
                pool(settings={"model": "/a/m", "model_name": "m"}),
                pool(name="b", settings={"model": "/b/m"}),
            ),
            "both serve m, with another model each",
        ),
        (text(pool(role="prefil")), "role of pool small is both or prefill or decode, not prefil"),
        (
            text(pool(settings={"model": "toy", "role": "prefill"})),
            "pool small cannot set role: it is a field of the pool",
        ),
        (
            text(pool(), pool(name="b", settings={"model": "/models/small", "block_size": 32})),
            "both serve small, with another block_size each",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_one_sentence(content: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_fleet(content)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


TARGETS = {"min": 1, "max": 4}


@pytest.mark.parametrize(
    ("role", "given", "targets"),
    [
        ("prefill", {}, (None, 8192)),
        ("prefill", {"target_in_flight": 3}, (3, None)),
        ("decode", {}, (16, None)),
        ("both", {"target_pending_tokens": 5}, (None, 5)),
    ],
)
def test_a_pool_with_a_role_scales_by_what_its_role_is_busy_with(
    role: str, given: dict[str, Any], targets: tuple[float | None, float | None]
) -> None:
    (only,) = parse_fleet(text(pool(role=role, autoscaling={**TARGETS, **given}))).pools
    assert only.replica.role == role and only.autoscaling is not None
    assert (only.autoscaling.target_in_flight, only.autoscaling.target_pending_tokens) == targets


PULLING = {"model": "/models/small", "host_kv_bytes": 2**30, "pull_bytes_per_second": 1e9}
MEMORY_ONLY = {"model": "/models/small", "host_kv_bytes": 2**30}


def roles(*pools: tuple[str, dict[str, Any]]) -> list[str]:
    """What is said of pools with these roles and settings."""
    each = (pool(name=f"p{n}", role=role, settings=settings) for n, (role, settings) in enumerate(pools))
    return role_complaints(parse_fleet(text(*each)))


@pytest.mark.parametrize(
    ("pools", "sentences"),
    [
        ([("both", {"model": "/models/small"})], []),
        ([("prefill", PULLING), ("decode", PULLING)], []),
        ([("prefill", {**PULLING, "max_batched_tokens": 8192}), ("both", PULLING)], []),
        (
            [("prefill", PULLING), ("prefill", PULLING)],
            ["no prompt of small will be split, because no pool decodes: each replica does all"],
        ),
        (
            [("decode", PULLING)],
            ["no prompt of small will be split, because no pool computes prompts for others: each replica"],
        ),
        (
            [("prefill", PULLING), ("decode", {"model": "/models/other"})],
            [
                "no prompt of small will be split, because no pool decodes",
                "pool p1 has the role decode, but no prompt will be split there, because it has no host",
            ],
        ),
        (
            [("prefill", PULLING), ("decode", MEMORY_ONLY), ("both", PULLING)],
            ["pool p1 has the role decode, but no prompt will be split there, because it does not pull ("],
        ),
        (
            [("prefill", {"model": "/models/small", "engine": "simulated"})],
            ["because the engine simulated has no KV that others can pull"],
        ),
        (
            [("prefill", {**PULLING, "chunk_tokens": 64}), ("decode", PULLING)],
            ["because no pool that decodes has the engine and the chunk_tokens of one that computes"],
        ),
    ],
)
def test_roles_that_can_do_nothing_are_said_aloud_and_refused_nowhere(
    pools: list[tuple[str, dict[str, Any]]], sentences: list[str]
) -> None:
    said = roles(*pools)
    assert len(said) == len(sentences)
    assert all(sentence in each for sentence, each in zip(sentences, said, strict=True)), said


def test_a_pool_may_find_servers_that_run_already() -> None:
    (only,) = parse_fleet(text(pool(engines={"urls": ["http://a:1"], "at_most": 3}))).pools
    assert only.engines == EngineSource(("http://a:1",), at_most=3)
    assert (only.num_replicas, only.replica.engine) == (0, "remote")
    (only,) = parse_fleet(text(pool(engines={"file": "/etc/servers"}))).pools
    assert only.engines == EngineSource(file="/etc/servers")
    (only,) = parse_fleet(text(pool(engines={"service": "vllm", "namespace": "llm", "port": 8000}))).pools
    assert only.engines == EngineSource(service="vllm", namespace="llm", port="8000")


def test_a_pool_of_servers_that_take_bodies_needs_no_model() -> None:
    found = pool(engines={"file": "/etc/servers"}, settings={"engine": "openai"})
    named = pool(settings={"engine": "openai", "engine_url": "http://a:1"})
    for fields in (found, named):
        (only,) = parse_fleet(text(fields)).pools
        assert (only.replica.engine, only.replica.model) == ("openai", None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"engines": {}}, "engines of pool small: engines are found by"),
        ({"engines": {"urls": "http://a:1"}}, "urls of engines of pool small are a list"),
        ({"engines": {"urls": ["nonsense"]}}, "a server's address is one such as"),
        ({"engines": {"file": "x"}, "replicas": 2}, "pool small cannot set replicas"),
        (
            {"engines": {"file": "x"}, "settings": {"model": "/m", "engine": "vllm"}},
            "pool small cannot set engine: it finds its servers",
        ),
        (
            {"engines": {"file": "x"}, "settings": {"model": "/m", "engine_endpoint": "10.0.0.1:8000"}},
            "pool small cannot set engine_endpoint: it finds its servers",
        ),
        (
            {"engines": {"file": "x"}, "settings": {"model": "/m", "engine_endpoint": "a:1"}},
            "pool small cannot set engine_endpoint",
        ),
        ({"name": "a_at_b"}, "cannot be named so"),
    ],
)
def test_a_pool_that_finds_servers_decides_nothing_that_they_do(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        parse_fleet(text(pool(**fields)))
