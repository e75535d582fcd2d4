"""vLLM's KV in our host memory, which is short: what a tenant has within its share stays."""

from typing import Any

import pytest

from replicas.engine_process.build import build_engine
from replicas.kvstore.layout import file_bytes
from replicas.protocol.events import Tier
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.test_offloading import BLOCK_BYTES, NUM_BLOCKS, NUM_SLOTS
from tests.replicas.vllm_engine.tiered_run import TieredRun

pytestmark = pytest.mark.vllm

NUM_TOKENS = 520
"""Four chunks, and so a quarter of the slots."""
ADA, EVE = b"ada-0000", b"eve-0000"


@pytest.mark.parametrize("has_share", [True, False])
def test_a_flood_of_another_tenant_leaves_what_is_within_a_share(environment: None, has_share: bool) -> None:
    settings: dict[str, Any] = {"host_kv_bytes": NUM_SLOTS * file_bytes(4 * BLOCK_BYTES)}
    engine = build_engine(vllm_config(num_blocks=NUM_BLOCKS, **settings))[0]
    try:
        run = TieredRun(engine)
        share = {"tenant": ADA, "store_share": 0.5 if has_share else 0.0}
        run.generate(prompt_of(engine, NUM_TOKENS, 1), max_tokens=1, **share)
        mine = {block for tier, block in run.held if tier is Tier.HOST}
        assert mine
        for seed in range(100, 108):
            run.generate(prompt_of(engine, NUM_TOKENS, seed), max_tokens=1, tenant=EVE)
        left = {block for tier, block in run.held if tier is Tier.HOST} & mine
        assert left == (mine if has_share else set())
    finally:
        engine.close()
