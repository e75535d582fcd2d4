"""Which divisions of the KV cache are served: told by kind, not by number."""

from types import SimpleNamespace
from typing import Any

import pytest

from replicas.kvcache.cache_groups import CacheGroup
from replicas.process.settings import SettingsError
from replicas.protocol.status import ModelCard
from tests.replicas.vllm_engine.conftest import vllm_config

pytestmark = pytest.mark.vllm

CARD = ModelCard("m", "ff", "vllm", 32, 100, 4096, 1000)
FULL, LATENT = CacheGroup("full_attention", 32), CacheGroup("mla_attention", 32)
WINDOW = CacheGroup("sliding_window", 32, 128)
STATE = CacheGroup("mamba", 32)
CHUNKED = CacheGroup("chunked_local_attention", 32, 256)
DRAFTED = CacheGroup("sliding_window", 32, 128, has_draft=True)


def fit(*groups: CacheGroup, has_more_tiers: bool = False) -> None:
    from replicas.vllm_engine.cache_shape import CacheShape
    from replicas.vllm_engine.starting import check_fit

    core: Any = SimpleNamespace(
        cache_shape=CacheShape(groups, 32, 32, 10_000, 0),
        has_more_tiers=has_more_tiers,
        num_lookahead_tokens=0,
    )
    check_fit(CARD, vllm_config(), core)


@pytest.mark.parametrize(
    "groups", [[FULL], [LATENT], [WINDOW], [STATE], [WINDOW, FULL], [CHUNKED, FULL], [DRAFTED, FULL]]
)
def test_every_kind_is_served_alone_and_beside_full_attention(
    groups: list[CacheGroup], environment: None
) -> None:
    fit(*groups)


@pytest.mark.parametrize("groups", [[CacheGroup("unknown", 32)], [CHUNKED], [DRAFTED]])
def test_what_cannot_be_foretold_is_refused_and_it_says_what_serves_it(
    groups: list[CacheGroup], environment: None
) -> None:
    with pytest.raises(SettingsError, match="disable_hybrid_kv_cache_manager=true in engine_args"):
        fit(*groups)


def test_tiers_below_the_device_are_for_full_attention_alone(environment: None) -> None:
    fit(FULL, has_more_tiers=True)
    for groups in ([WINDOW], [WINDOW, FULL]):
        with pytest.raises(SettingsError, match="it is served without host_kv_bytes"):
            fit(*groups, has_more_tiers=True)


@pytest.mark.parametrize(
    ("groups", "alignment", "expected"),
    [
        ([WINDOW, FULL], 32, 2048),
        ([WINDOW], 32, 2048),
        ([CacheGroup("sliding_window_mla", 96, 128), LATENT], 96, 2112),
        ([WINDOW, STATE, FULL], 32, 0),
        ([STATE, FULL], 32, 0),
        ([CHUNKED, FULL], 32, 0),
        ([FULL], 32, 0),
    ],
)
def test_models_with_windows_keep_points_at_intervals(
    groups: list[CacheGroup], alignment: int, expected: int, environment: None
) -> None:
    from replicas.vllm_engine.cache_shape import CacheShape

    assert CacheShape(tuple(groups), 32, alignment, 10_000, 0).default_retention == expected


@pytest.mark.parametrize(
    ("groups", "of_vllm", "expected"),
    [
        ([WINDOW, FULL], 0, 0),
        ([WINDOW, FULL], 256, 256),
        ([WINDOW, FULL], None, 32),
        ([STATE, FULL], None, 0),
        ([STATE, FULL], 256, 0),
        ([CHUNKED, FULL], 0, 32),
    ],
)
def test_the_card_says_which_points_a_router_may_count_on(
    groups: list[CacheGroup], of_vllm: int | None, expected: int, environment: None
) -> None:
    from replicas.vllm_engine.cache_shape import CacheShape

    assert CacheShape(tuple(groups), 32, 32, 10_000, of_vllm).retention_interval == expected
