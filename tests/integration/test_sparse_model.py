"""A sparse model, end to end: what a router expects of two simulated replicas is what they have."""

import json
from pathlib import Path

import httpx
import pytest

from cluster.cli import main
from loadtests.benches.cause_asker import MODEL, Asker
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import local_stack
from router.caller import Tenant
from tests.replicas.vllm_engine.killed_run import KilledRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

REPLICA = {
    "engine": "simulated",
    "model_name": MODEL,
    "context_length": 2048,
    "num_blocks": 4000,
    "simulated_groups": "window:16:64 full:16",
    "simulated_hardware": "instant",
}


def test_hits_are_expected_and_what_cannot_be_resumed_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = write_key_file(tmp_path / "keys.json", [Tenant(name="asker")], operators=["asker"])["asker"]
    routers = {"keys_file": tmp_path / "keys.json"}
    with local_stack(replica_settings=[REPLICA] * 2, router_settings=routers) as stack:
        asker = Asker(stack, key, 16, seed=1)
        shared = asker.tokens(400)
        told, shown, file = [], [], tmp_path / "request.json"
        places = ["--url", stack.url, "--redis-url", stack.redis_url, "--api-key", key]
        for _ in range(4):
            prompt = shared + asker.tokens(50)
            file.write_text(json.dumps({"prompt": prompt}))
            assert main(["where", "--file", str(file), "--json", *places]) == 0
            found = json.loads(capsys.readouterr().out)
            shown.append(max((each["num_resumed_tokens"], each["num_tokens"]) for each in found))
            explanation = asker.ask(prompt)
            assert explanation is not None
            told.append(explanation)
            asker.settle()
        asker.close()
    assert [each["cached_tokens"] for each in told] == [0, 0, 400, 400]
    assert shown == [(0, 0), (0, 384), (400, 400), (400, 400)]
    assert len({each["replica"] for each in told}) == 1
    assert [each["cause"] for each in told[:2]] == ["never_cached", "not_resumable"]
    assert told[1]["spans"][0]["cause"] == "not_resumable" and told[1]["spans"][0]["end"] == 400
    assert all(each["cause"] in ("hit", "never_cached") for each in told[2:])


def test_hits_are_foretold_and_answers_go_on_while_replicas_are_killed() -> None:
    paced = {**REPLICA, "num_blocks": 200, "simulated_hardware": "h100-8b"}
    with (
        local_stack(replica_settings=[paced] * 2) as stack,
        httpx.Client(base_url=stack.url, timeout=60) as client,
    ):
        run = KilledRun(stack, client, MODEL, 16)
        run.go(num_prompts=20, num_kills=2)
    assert not run.wrong, (run.wrong, run.figures)
    assert run.figures["hit tokens"] and run.figures["resumed"] >= 2, run.figures
    assert not run.figures["other than asked again"], run.figures
