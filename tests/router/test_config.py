"""Settings of a router: two budgets, what is off, and old names."""

import json

import pytest

from replicas.process.settings import SettingsError, build, old_setting_warnings, old_settings_of
from router.__main__ import main
from router.config import CAN_BE_OFF, RouterConfig

MIB = 2**20
MEMORY = {
    "image_memory_bytes": 1024 * MIB,
    "body_memory_bytes": 256 * MIB,
    "max_waiting_bytes": 256 * MIB,
    "tokenizer_cache_bytes": 64 * MIB,
    "hash_cache_bytes": 32 * MIB,
    "cache_memory_bytes": 32 * MIB,
    "response_memory_bytes": 64 * MIB,
    "history_bytes": 64 * MIB,
    "explain_bytes": 64 * MIB,
}
REDIS = {
    "all_caches_bytes": 64 * MIB,
    "all_responses_bytes": 64 * MIB,
    "all_history_bytes": 64 * MIB,
    "max_cache_bytes": MIB,
}


@pytest.mark.parametrize(("budget", "shares"), [("memory_bytes", MEMORY), ("redis_bytes", REDIS)])
def test_shares_are_parts_of_a_budget(budget: str, shares: dict[str, int]) -> None:
    config = RouterConfig()
    assert {name: getattr(config, name) for name in shares} == shares
    doubled = build(RouterConfig, {budget: 2 * getattr(config, budget)})
    assert {name: getattr(doubled, name) for name in shares} == {
        name: 2 * size for name, size in shares.items()
    }
    assert old_setting_warnings(doubled) == []


def test_the_shares_of_memory_leave_room_for_tokenizers_of_more_models() -> None:
    left = RouterConfig().memory_bytes - sum(MEMORY.values())
    assert left == 3 * MEMORY["tokenizer_cache_bytes"]


def test_bounds_follow_max_in_flight_only_upwards() -> None:
    def bounds(config: RouterConfig) -> tuple[int, ...]:
        return config.max_sequences, config.max_tokens_in_flight, config.max_queued, config.max_waiting

    assert bounds(RouterConfig()) == bounds(RouterConfig(max_in_flight=1)) == (8192, 2**24, 4096, 2048)
    assert bounds(RouterConfig(max_in_flight=10_000)) == (20_000, 40_960_000, 10_000, 5000)


@pytest.mark.parametrize(
    ("feature", "switch"),
    [
        ("caches", "max_caches"),
        ("responses", "max_responses"),
        ("history", "history_bytes"),
        ("shared_history", "all_history_bytes"),
        ("explain", "explain_bytes"),
        ("tool_gaps", "tool_gap_seconds"),
    ],
)
def test_a_feature_is_off_by_its_name(feature: str, switch: str) -> None:
    config = build(RouterConfig, {"off": feature})
    assert getattr(config, switch) == 0 < getattr(RouterConfig(), switch)
    assert getattr(build(RouterConfig, {"off": feature, switch: 5}), switch) == 5, "an old name wins"
    assert feature in CAN_BE_OFF


def test_a_feature_that_cannot_be_off_is_named() -> None:
    with pytest.raises(SettingsError, match=r"setting off takes any of caches, .*, not 'chats'"):
        build(RouterConfig, {"off": "explain,chats"})


def test_every_old_name_counts_and_warns() -> None:
    for name, instead in old_settings_of(RouterConfig).items():
        value = 3 * getattr(RouterConfig(), name)
        config = build(RouterConfig, {name: str(value)})
        assert getattr(config, name) == value
        assert old_setting_warnings(config) == [
            f"setting {name} still counts, and goes with the next version: {instead}"
        ]


def test_a_router_logs_what_replaces_an_old_name(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"KVASIR_ROUTER_HISTORY_BYTES": "0"}
    assert main(["--policy=none", "--port=0", "--log-format=json"], environment) == 2
    warning = json.loads(capsys.readouterr().err.splitlines()[0])
    assert warning["level"].lower() == "warning"
    assert "setting history_bytes still counts" in str(warning)
    assert "set memory_bytes, or off=history for none" in str(warning)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be at least 1"),
        ({"redis_bytes": 191}, "redis_bytes must be at least 1048576"),
        ({"memory_bytes": 64 * MIB}, r"memory_bytes, an eighth of which is for bodies \(8388608\), times"),
        ({"body_memory_bytes": MIB}, r"memory_bytes, .* for bodies \(1048576\), times address_share, must"),
        ({"image_memory_bytes": MIB}, r"memory_bytes, .* for images \(1048576\), times address_share, must"),
        ({"history_bytes": -1}, "history_bytes must be at least 0"),
        ({"head_seconds": "nan"}, "head_seconds must be above 0"),
    ],
)
def test_what_a_router_cannot_do_with_is_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        build(RouterConfig, settings)
