"""A model of windows and full attention on two replicas that are killed: hits are foretold, answers go on."""

import os
from pathlib import Path

import httpx
import pytest

from loadtests.stacks.local_stack import local_stack
from tests.replicas.vllm_engine.killed_run import KilledRun

pytestmark = [pytest.mark.vllm, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "gpt-oss"
NUM_PROMPTS = int(os.environ.get("KVASIR_PROMPTS") or 60)


def test_hits_are_foretold_and_answers_go_on_while_replicas_are_killed(tmp_path: Path) -> None:
    from replicas.toy_model.make_hybrid_model import write_hybrid_model

    write_hybrid_model("gpt_oss", tmp_path)
    settings = {
        "engine": "vllm",
        "model": tmp_path,
        "model_name": MODEL,
        "num_blocks": 90,  # so few that they are evicted
        "context_length": 1100,
        "max_batched_tokens": 512,
        "num_threads": 1,
    }
    with (
        local_stack(num_replicas=2, replica_settings=settings) as stack,
        httpx.Client(base_url=stack.url, timeout=120) as client,
    ):
        run = KilledRun(stack, client, MODEL, 32)
        run.go(NUM_PROMPTS, num_kills=2)
    assert not run.wrong, (run.wrong, run.figures)
    assert run.figures["hit tokens"] > 0.1 * run.figures["prompt tokens"], run.figures
    assert run.figures["resumed"] >= 2 and not run.figures["other than asked again"], run.figures
