from dataclasses import replace

import pytest
import yaml

from cluster.config import BackoffSpec, FleetSpec, FoundServer
from cluster.controller.changes import FleetState, applied, given_up, rolled, with_found
from cluster.controller.kept_state import from_kept, to_kept
from cluster.fleet_file import parse_fleet
from tests.cluster.finding import finding

MACHINES = [{"CPU": 64.0, "GPU": 8.0, "slot": 9.0}]

FULL = """
redis_url: redis://:secret@redis:6379/2
log_format: json
metrics_host: 0.0.0.0
metrics_port: 9100
drain_seconds: 12.5
pools:
  - name: large
    replicas: 2
    settings:
      engine: vllm
      model: /models/large
      model_name: large
      kv_cache_bytes: 1099511627776
      adapters: {sql: /adapters/sql, "no": /adapters/no}
      engine_args: {seed: 1, ratio: 1.0e-05, none: null, "on": "off", sizes: [1, 2], deep: {1: [true, "1"]}}
    resources: {cpus: 1, gpus: 2, custom: {slot: 0.5}, bundle: gpu}
    surge: 0
    drain_seconds: 3
    threads: 2
  - name: small
    settings: {engine: simulated, model: toy, trace_sample_ratio: 0.1}
    resources: {cpus: 0.5}
    autoscaling: {min: 1, max: 3, target_in_flight: 2.5, down_seconds: 7, tolerance: 0.25}
"""


def states() -> list[FleetState]:
    state = applied(FleetState(FleetSpec(())), parse_fleet(FULL), MACHINES)
    rolling = rolled(state, "small", {"max_running": "9"}, MACHINES)
    return [
        FleetState(FleetSpec(())),
        state,
        rolling,
        rolled(rolling, "large", {}, MACHINES),
        given_up(rolling, "small", "it did: not\nstart, says 'ä'"),
        with_found(
            applied(FleetState(FleetSpec(())), FleetSpec((finding(file="/servers"), finding("q"))), MACHINES),
            "p",
            [FoundServer("http://a:1"), FoundServer("http://b:1", 1)],
        ),
        replace(state, spec=replace(state.spec, backoff=BackoffSpec(0.25, 3.0, 1.5), is_growing=True)),
    ]


@pytest.mark.parametrize("state", states())
def test_what_is_kept_is_read_as_it_was_and_no_replica_has_another_revision(state: FleetState) -> None:
    read = from_kept(to_kept(state))
    assert read == state
    assert repr(read) == repr(state), "revisions are made of it"
    assert [pool.revision for pool in read.spec.pools] == [pool.revision for pool in state.spec.pools]
    assert read.spec.revision == state.spec.revision


def test_a_state_of_another_version_is_read_as_far_as_it_is_known() -> None:
    state = states()[2]
    plain = yaml.safe_load(to_kept(state))
    del plain["applied_revision"], plain["spec"]["metrics_port"], plain["spec"]["pools"][0]["surge"]
    del plain["spec"]["pools"][0]["replica"]["lease_seconds"]
    plain["fresh"] = plain["spec"]["fresh"] = plain["spec"]["pools"][1]["fresh"] = {"a": 1}
    plain["spec"]["pools"][1]["replica"]["fresh"] = plain["spec"]["pools"][1]["autoscaling"]["fresh"] = 2
    read = from_kept(yaml.safe_dump(plain).encode())
    first, second = read.spec.pools
    assert (read.applied_revision, read.spec.metrics_port, first.surge) == (None, None, 1)
    assert replace(first, surge=0) == state.spec.pools[0]
    assert second == state.spec.pools[1]


@pytest.mark.parametrize("kept", [b"", b"\x80\x05\x95", b"[1, 2]", b"spec: {}", b"a: [", b"previous: {}"])
def test_what_is_no_state_is_refused(kept: bytes) -> None:
    with pytest.raises(ValueError, match="not that of a fleet"):
        from_kept(kept)
