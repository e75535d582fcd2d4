"""`kvasir simulate` as it is typed."""

import argparse
import json
from pathlib import Path

import pytest

from cluster.cli import main
from loadtests.simulation.command import TIMED_HARDWARE, _job, add_arguments
from loadtests.workloads import multi_turn, with_block_tokens
from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from replicas.simulated_engine.engine import SimulatedEngine

SMALL = ["multi-turn", "--set", "num_sessions=6", "--jobs", "1"]


def test_it_prints_a_column_for_each_policy_and_keeps_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    words = [*SMALL, "--policy", "kvasir,random", "--seed", "1", "--seed", "2", "--json", str(file)]
    assert main(["simulate", *words]) == 0
    headline, columns, first, *_ = capsys.readouterr().out.splitlines()
    assert headline.startswith("multi-turn: ") and headline.endswith("2 seeds.")
    assert columns.split() == ["kvasir", "random"]
    assert first.startswith("token hit rate")
    content = json.loads(file.read_text())
    assert content["settings"]["workload"] == "multi-turn"
    assert [result["policy"] for result in content["results"]] == ["kvasir", "random"]
    assert all(len(result["runs"]) == 2 for result in content["results"])
    kvasir, random = (result["figures"]["token_hit_rate"] for result in content["results"])
    assert kvasir > random


def test_runs_in_several_processes_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for jobs in ("1", "2"):
        assert main(["simulate", *SMALL, "--policy", "random,round_robin", "--jobs", jobs]) == 0
        lines = capsys.readouterr().out.splitlines()
        printed.append([line.split() for line in lines if "real time" not in line])
    assert printed[0] == printed[1]


def test_a_sweep_says_how_many_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sweep", "replicas", "--values", "1,2", "--slo-ttft", "100"]
    assert main(["simulate", *SMALL, *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "1 replicas keep 90 % of the requests within 100 s to the first token (100.0 %)."
    assert main(["simulate", *SMALL, "--sweep", "rate", "--values", "1,2"]) == 0


def test_goodput_within_both_limits_heeds_the_time_between_tokens(tmp_path: Path) -> None:
    found = []
    for limit in ("1e-6", "1000"):
        file = tmp_path / "figures.json"
        assert main(["simulate", *SMALL, "--slo-tpot", limit, "--json", str(file)]) == 0
        (result,) = json.loads(file.read_text())["results"]
        figures = result["figures"]
        found.append((figures["goodput_arriving"], figures["goodput_both"], figures["good_both"]))
        assert figures["good_share"] == 1.0
    (by_ttft, *none), (same, both, share) = found
    assert by_ttft == same == both > 0 and share == 1.0 and none == [0, 0]


@pytest.mark.parametrize("hardware", TIMED_HARDWARE)
def test_without_settings_a_replica_is_what_the_simulated_engine_is(hardware: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["multi-turn", "--hardware", hardware])
    shape = _job(arguments, "kvasir", seed=1, value=None).options.shape
    engine, _ = build_engine(
        ReplicaConfig(engine="simulated", simulated_hardware=hardware, block_size=shape.block_size)
    )
    assert isinstance(engine, SimulatedEngine)
    assert engine._cost == shape.cost
    assert engine.card.num_blocks == shape.num_blocks
    assert engine.card.max_batched_tokens == shape.max_batched_tokens
    assert engine.card.max_running == shape.max_running


def figures_of(words: list[str], tmp_path: Path) -> dict[str, float]:
    file = tmp_path / "figures.json"
    assert main(["simulate", *words, "--jobs", "1", "--json", str(file)]) == 0
    figures: dict[str, float] = json.loads(file.read_text())["results"][0]["figures"]
    return figures


def test_a_sparse_model_is_expected_what_it_has_and_full_attention_is_not(tmp_path: Path) -> None:
    words = ["zipf-b2b", "--qps", "20", "--limit", "150", "--replicas", "4", "--set", "block_tokens=256"]
    words += ["--groups", "3*state:256 full:256", "--set", "output_tokens=50"]
    by_points = figures_of(words, tmp_path)
    by_reach = figures_of([*words, "--route-by-reach"], tmp_path)
    assert by_points["prediction_exact"] > 0.9 > by_reach["prediction_exact"]
    assert by_points["token_hit_rate"] > 0.2
    more = figures_of([*words, "--retention", "256"], tmp_path)
    assert more["token_hit_rate"] > by_points["token_hit_rate"]


@pytest.mark.parametrize("groups", [[], ["--groups", "window:256:1024 full:256"]])
def test_perfect_knowledge_does_not_depend_on_what_routers_hear(groups: list[str], tmp_path: Path) -> None:
    words = ["zipf-b2b", "--qps", "20", "--limit", "150", "--replicas", "4", "--set", "block_tokens=256"]
    words += [*groups, "--set", "output_tokens=50", "--event-delay", "1000", "--no-announcements"]
    deaf = figures_of(words, tmp_path)
    perfect = figures_of([*words, "--policy", "perfect"], tmp_path)
    assert perfect["prediction_exact"] == 1 > deaf["prediction_exact"]
    assert perfect["token_hit_rate"] > deaf["token_hit_rate"]


def test_a_workload_in_blocks_of_another_size_has_the_same_prompts() -> None:
    workload = multi_turn(seed=1, qps=1.0, num_sessions=4, block_tokens=32)
    for size in (8, 32, 96):
        other = with_block_tokens(workload, size)
        assert with_block_tokens(other, size) == other
        for old, new in zip(workload.requests, other.requests, strict=True):
            assert len(new.prefix_ids) == -(-new.num_input_tokens // size)
            shared = [
                sum(a == b for a, b in zip(each.prefix_ids, first.prefix_ids, strict=False))
                for each, first in ((old, workload.requests[0]), (new, other.requests[0]))
            ]
            assert (shared[0] - 1) * 32 // size - 1 <= shared[1] <= -(-shared[0] * 32 // size)
    with pytest.raises(ValueError, match="neither divide"):
        with_block_tokens(workload, 48)


def test_a_file_of_sessions_is_served_in_a_closed_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, figures = tmp_path / "few.jsonl", tmp_path / "figures.json"
    turns = [
        {"in": 600 * (number + 1), "out": 5, "think": 3.0, "blocks": [[0, 600 * (number + 1) // 512]]}
        for number in range(4)
    ]
    lines = [
        {"format": "kvasir-sessions", "version": 1, "block_tokens": 512},
        {"id": "a", "lane": 0, "after": 1.0, "agent": "main", "turns": turns},
        {"id": "a.0", "lane": 0, "after": 0, "agent": "x", "parent": "a", "turn": 1, "turns": turns[:1]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--policy", "kvasir,sticky,perfect", "--kill", "0@2", "--queue-seconds", "600", "--jobs", "2"]
    assert main(["simulate", str(file), *words, "--json", str(figures)]) == 0
    headline, columns, first, *_ = capsys.readouterr().out.splitlines()
    assert headline.startswith(
        "few: 1 sessions in 1 lanes, 1 subagents, 5 turns, 6600 prompt tokens; 8 replicas"
    )
    assert columns.split() == ["kvasir", "sticky", "perfect"]
    assert first.split()[:2] == ["session", "mean"]
    for result in json.loads(figures.read_text())["results"]:
        assert result["figures"]["session_mean"] > 9 and result["figures"]["slowdown_mean"] >= 0.9
