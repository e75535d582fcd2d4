"""The fleet file: what it may say, and the one sentence for everything else."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import AutoscaleSpec, EngineSource, PoolSpec
from cluster.fleet_file import changed, model_name, parse_fleet, settings_from
from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError

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


def test_what_is_left_out_has_its_default() -> None:
    (only,) = parse_fleet(text(pool())).pools
    replica = ReplicaConfig(model="/models/small", redis_url=REDIS, drain_seconds=30)
    assert only == PoolSpec(1, "small", replica, drain_seconds=30, is_on_node_address=True)


def test_a_pool_whose_server_names_its_model_is_no_pool_of_the_toy_model() -> None:
    by_server = pool(name="b", engines={"urls": ["http://a:1"]}, settings={"engine": "openai"})
    parse_fleet(text(pool(settings={"model": "/models/toy_model"}), by_server))


def test_all_pools_have_the_fleets_secret_file_and_none_without_one() -> None:
    spec = parse_fleet(text(pool(), pool(name="b"), secret_file="/etc/kvasir/secret"))
    assert [each.replica.secret_file for each in spec.pools] == ["/etc/kvasir/secret"] * 2
    assert spec.secret_file == "/etc/kvasir/secret"
    assert parse_fleet(text(pool())).secret_file is None


def test_a_redis_url_that_is_given_goes_before_the_file() -> None:
    (only,) = parse_fleet(text(pool()), "redis://elsewhere:6379/1").pools
    assert only.replica.redis_url == "redis://elsewhere:6379/1"


def test_a_host_that_is_set_stays() -> None:
    settings = {"model": "toy", "host": "10.0.0.1", "model_aliases": ["gpt-4o", "a,b"]}
    (only,) = parse_fleet(text(pool(settings=settings))).pools
    assert only.replica.model_aliases == ("gpt-4o", "a,b")
    assert (only.replica.host, only.is_on_node_address, only.replica.model) == ("10.0.0.1", False, None)


def test_pools_of_one_model_may_differ_in_what_no_router_minds() -> None:
    spec = parse_fleet(
        text(pool(), pool(name="spare", settings={"model": "/models/small", "max_running": 9}))
    )
    assert len(spec.pools) == 2


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
        (text(pool(), drain_seconds="soon"), "drain_seconds of the fleet file cannot be 'soon'"),
        (text(pool(), drain_seconds=-1), "cannot be negative"),
        (text(pool(), ray_autoscaler="yes please"), "takes true or false"),
        (text(pool(), log_format="xml"), "log_format of the fleet file is text or json"),
        (text(pool(), metrics_port=70_000), "metrics_port of the fleet file cannot be 70000"),
        (text("small"), "pool number 1 of the fleet file has no name"),
        (text({"settings": {"model": "toy"}}), "pool number 1 of the fleet file has no name"),
        (text(pool(name="a b")), "a pool cannot be named 'a b'"),
        (text({"name": "small"}), "pool small has no model"),
        (text(pool(settings={"engine": "vllm"})), "pool small has no model"),
        (text(pool(settings={"model": "toy", "engine": "magic"})), "pool small: setting engine is"),
        (text(pool(settings={"model": "toy", "model_aliases": ["a\nb"]})), "at most 4096 names of 1 to 512"),
        (text(pool(settings={"model": "toy", "model_aliases": ["a"] * 4097})), "at most 4096 names"),
        (text(pool(settings={"model": "toy", "block_sise": 3})), "block_sise; did you mean block_size"),
        (text(pool(settings={"model": "toy", "replica_id": "x"})), "cannot set replica_id"),
        (text(pool(settings={"model": "toy", "redis_url": "x"})), "cannot set redis_url"),
        (text(pool(settings={"model": "toy", "secret": "ab" * 16})), "give secret_file, beside the pools"),
        (text(pool(settings={"model": "toy", "secret_file": "x"})), "cannot set secret_file"),
        (text(pool(), secret_file=3), "secret_file of the fleet file cannot be 3; it takes text"),
        (text(pool(replicas=-1)), "replicas of pool small cannot be -1"),
        (text(pool(replicas=1.5)), "replicas of pool small cannot be 1.5"),
        (text(pool(replicas=True)), "replicas of pool small cannot be True"),
        (text(pool(replica=2)), "pool small has an unknown field replica; did you mean replicas"),
        (text(pool(surge=-1)), "surge of pool small cannot be -1"),
        (text(pool(threads=0)), "threads of pool small cannot be 0"),
        (text(pool(resources={"cpu": 1})), "unknown field cpu; did you mean cpus"),
        (text(pool(resources={"cpus": -1})), "a negative number of CPUs"),
        (text(pool(resources={"cpus": float("nan")})), "not a number"),
        (text(pool(resources={"gpus": 1.5})), "only whole ones"),
        (text(pool(resources={"cpus": 0})), "must ask for some"),
        (text(pool(resources={"custom": {"GPU": 1}})), "cannot have a custom resource named 'GPU'"),
        (text(pool(resources={"custom": {"slot": 0}})), "more than 0"),
        (text(pool(resources={"custom": ["slot"]})), "custom resources of pool small are a mapping"),
        (text(pool(resources={"bundle": "rack"})), "bundle of pool small is machine or gpu"),
        (text(pool(autoscaling={"max": 2})), "autoscaling of pool small needs min and max"),
        (text(pool(autoscaling={"min": 1, "max": 2})), "needs target_in_flight or target_pending_tokens"),
        (
            text(pool(autoscaling={"min": 3, "max": 2, "target_in_flight": 1})),
            "autoscaling of pool small: autoscaling needs 1 <= min <= max",
        ),
        (text(pool(autoscaling={"min": 1, "max": 2, "target_in_flight": 0})), "above 0"),
        (text(pool(autoscaling={"min": 1, "max": 2, "target": 3})), "unknown field target"),
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


def test_a_changed_setting_makes_another_revision_and_the_number_of_replicas_does_not() -> None:
    (old,) = parse_fleet(text(pool())).pools
    (more,) = parse_fleet(text(pool(replicas=7, surge=3))).pools
    assert more.revision == old.revision
    new = changed(old, settings_from(["max-running=9"]))
    assert new.replica.max_running == 9
    assert new.revision != old.revision
    assert changed(new, {"max_running": "256"}).revision == old.revision, "and the way back is known"


def test_without_a_setting_all_replicas_are_made_anew() -> None:
    (old,) = parse_fleet(text(pool())).pools
    assert changed(old, {}).revision not in (old.revision, changed(changed(old, {}), {}).revision)


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        (["max_running"], "--set takes NAME=VALUE"),
        (["max_runing=3"], "did you mean max_running"),
        (["max_running=many"], "cannot be 'many'"),
        (["replica_id=x"], "pool small cannot set replica_id"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(pairs: list[str], sentence: str) -> None:
    (old,) = parse_fleet(text(pool())).pools
    with pytest.raises(SettingsError, match=sentence):
        changed(old, settings_from(pairs))


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
        ({"engines": {"fiel": "x"}}, "did you mean file?"),
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
