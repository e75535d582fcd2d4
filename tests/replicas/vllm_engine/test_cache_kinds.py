"""Which kinds of KV cache are served: told by kind, not by number."""

from types import SimpleNamespace
from typing import Any

import pytest

from replicas.process.settings import SettingsError
from replicas.protocol.status import ModelCard
from tests.replicas.vllm_engine.conftest import vllm_config

pytestmark = pytest.mark.vllm

CARD = ModelCard("m", "ff", "vllm", 32, 100, 4096, 1000)


@pytest.mark.parametrize("kinds", [("full_attention",), ("mla_attention",), ("sink_full_attention",)])
def test_full_attention_of_any_kind_is_served(kinds: tuple[str, ...], environment: None) -> None:
    from replicas.vllm_engine.starting import check_fit

    core: Any = SimpleNamespace(cache_kinds=kinds)
    check_fit(CARD, vllm_config(), core)


@pytest.mark.parametrize(
    "kinds",
    [
        ("sliding_window",),
        ("mamba",),
        ("unknown",),
        ("sliding_window", "full_attention"),
        ("full_attention", "full_attention"),
    ],
)
def test_others_are_refused_and_it_says_what_serves_them(kinds: tuple[str, ...], environment: None) -> None:
    from replicas.vllm_engine.starting import check_fit

    core: Any = SimpleNamespace(cache_kinds=kinds)
    with pytest.raises(SettingsError, match="disable_hybrid_kv_cache_manager=true in engine_args") as caught:
        check_fit(CARD, vllm_config(), core)
    assert kinds[0] in str(caught.value)
