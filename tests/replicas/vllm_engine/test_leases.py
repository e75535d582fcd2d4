"""Leases on the KV of vLLM: granted, kept while others pass through, there after a restart."""

from pathlib import Path

import pytest

from replicas.protocol.prefix_leases import MAX_LEASE_SECONDS, LeaseAnswer, LeaseRefusal, PrefixLease
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.test_kv_on_disk import (  # noqa: F401 (a fixture)
    _reading_is_always_worth_it,
    opened,
    settle,
)

pytestmark = pytest.mark.vllm

DAY = MAX_LEASE_SECONDS


def test_a_leased_prompt_outlasts_the_tiers_and_a_restart(tmp_path: Path) -> None:
    for run in opened(tmp_path):
        prompt = prompt_of(run.engine, 300)
        wishes = (PrefixLease(9, DAY), PrefixLease(3, 60), PrefixLease(9, DAY + 1))
        first = run.generate(prompt, max_tokens=2, leases=wishes)
        assert run.usage(first).leases == (
            LeaseAnswer(DAY, 256),
            LeaseAnswer(refusal=LeaseRefusal.NO_WHOLE_CHUNK),
            LeaseAnswer(refusal=LeaseRefusal.TOO_LONG),
        )
        settle(run)
        assert any(frame.leases is not None and frame.leases.num_granted == 1 for frame in run.frames)
        for seed in range(50, 62):
            run.generate(prompt_of(run.engine, 300, seed), max_tokens=1)
            settle(run)
    for run in opened(tmp_path):
        for seed in range(70, 78):
            run.generate(prompt_of(run.engine, 300, seed), max_tokens=1)
            settle(run)
        usage = run.usage(run.generate(prompt, max_tokens=2))
        assert usage.num_disk_tokens == 256 and usage.num_evicted_early_tokens == 0
        assert usage.leases == ()
