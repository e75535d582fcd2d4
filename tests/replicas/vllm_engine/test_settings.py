"""What vLLM cannot start with, and what is not served: one clear sentence, and never a lease."""

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replicas.__main__ import EXIT_NOT_STARTED, main
from replicas.engine_process.build import build_engine
from replicas.errors import StartupError
from replicas.kvcache.cache_groups import CacheGroup
from replicas.loadable import complaint
from replicas.process.settings import SettingsError
from replicas.protocol.status import ModelCard
from replicas.toy_model import toy_model_path
from replicas.vllm_engine.environment import vllm_environment
from tests.replicas.mirror import connect
from tests.replicas.vllm_engine.conftest import vllm_config

pytestmark = pytest.mark.vllm

UNFINISHED_TIER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"block_size": 16}, "needs a multiple of 32"),
        ({"engine_args": {"tensor_paralel_size": 2}}, "did you mean tensor_parallel_size"),
        ({"engine_args": {"block_size": 64}}, "use the setting block_size"),
        ({"engine_args": {"override-generation-config": {"top_k": 1}}}, "use the setting sampling_override"),
        ({"engine_args": {"enable_prefix_caching": False}}, "a replica needs it as it is"),
        (
            {"engine_args": {"mm-processor-kwargs": {"max_pixels": 5000}}},
            "mm_processor_kwargs: what becomes of images belongs to the model; .* preprocessor_config.json",
        ),
        ({"device": "cuda"}, "setting device is cuda"),
        ({"context_length": 4096, "num_blocks": 20}, "or lower context_length"),
        ({"num_blocks": None, "kv_cache_bytes": 10}, "or lower context_length"),
        ({"engine_args": {"data-parallel-size": 2}}, "a replica needs it as it is"),
        ({"engine_args": {"seed": 1, "tokenizer-mode": "auto", "tokenizer_mode": "slow"}}, "sets .* twice"),
        ({"engine_args": {"quantization": "awq"}}, "vLLM cannot serve"),
        ({"engine_args": {"enable_lora": True, "max_loras": 0}}, "settings: max_loras: Input should be"),
        ({"engine_args": {"enable_chunked_prefill": False}}, "is smaller than max_model_len"),
        ({"engine_args": {"tensor_parallel_size": 3}}, "must be divisible by tensor parallel size"),
        ({"engine_args": {"kv_transfer_config": UNFINISHED_TIER}}, "cpu_bytes_to_use must be specified"),
        ({"host_kv_bytes": 1000}, "host_kv_bytes holds no chunk of 128 tokens, which takes 167,936"),
        ({"host_kv_bytes": 10**6, "engine_args": {"kv_transfer_config": UNFINISHED_TIER}}, "set one of them"),
        (
            {"host_kv_bytes": 10**6, "engine_args": {"kv_offloading_size": 1}},
            "kv_offloading_size .* both keep KV",
        ),
        ({"host_kv_bytes": 10**6, "engine_args": {"tensor_parallel_size": 2}}, "needs vLLM in one process"),
        ({"engine_args": {"trust-remote-code": True}}, "trust_remote_code, which may run code .* trust_code"),
        ({"engine_args": {"load_format": "pt"}}, "load_format pt, which may run code"),
        ({"context_length": 100_000}, "is greater than the derived max_model_len"),
        ({"adapters": {"tuned": "/nowhere"}}, "adapter tuned: there is no directory /nowhere"),
        ({"model": "/nowhere"}, "tokenizer.json"),
    ],
)
def test_settings_that_do_not_fit_are_one_clear_sentence(
    alone: None, settings: dict[str, Any], sentence: str
) -> None:
    from replicas.checkpoints.model_config import CheckpointError

    with pytest.raises((SettingsError, StartupError, CheckpointError), match=sentence) as caught:
        build_engine(vllm_config(**settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine_args", "given", "threads", "binding"),
    [
        ({}, {}, "8", "nobind"),
        ({"tensor-parallel-size": 2, "pipeline_parallel_size": 2}, {}, "2", "nobind"),
        ({"tensor_parallel_size": 16}, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "1", "auto"),
    ],
)
def test_ranks_share_the_threads_and_are_bound_only_by_whoever_says_so(
    engine_args: dict[str, object], given: dict[str, str], threads: str, binding: str
) -> None:
    made = vllm_environment(8, engine_args, given)
    assert (made["OMP_NUM_THREADS"], made["VLLM_CPU_OMP_THREADS_BIND"]) == (threads, binding)
    assert "OMP_NUM_THREADS" not in vllm_environment(None, engine_args)


def test_an_environment_that_vllm_would_misread_is_refused(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(StartupError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        build_engine(vllm_config())


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """A model that no engine knows, with all the files of one."""
    directory = tmp_path / "abacus"
    shutil.copytree(toy_model_path(), directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["AbacusForCausalLM"], "model_type": "abacus"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_what_cannot_start_is_one_sentence_an_exit_code_and_never_a_lease(
    alone: None, redis_url: str, other_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--engine", "vllm", "--redis-url", redis_url, "--model", str(other_model)]
    assert main(flags, {}) == EXIT_NOT_STARTED
    said = capfd.readouterr().err.splitlines()
    assert "vLLM cannot serve" in said[-1]
    assert not any("Traceback" in line for line in said)
    assert asyncio.run(keys_of(redis_url)) == []


async def keys_of(redis_url: str) -> list[bytes]:
    redis = connect(redis_url)
    keys: list[bytes] = await redis.keys("*")
    await redis.aclose()
    return keys


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("*.py", "corpus", "__pycache__")
    return Path(shutil.copytree(toy_model_path(), tmp_path / "copy", ignore=ignored))


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_vllm_serves(alone: None, checkpoint: Path) -> None:
    assert complaint(vllm_config(model=str(checkpoint))) is None
    edit(checkpoint, architectures=["MixtralForCausalLM"])
    assert complaint(vllm_config(model=str(checkpoint))) is None, "which torch would not take"


def test_what_vllm_would_refuse_is_told_in_its_words(alone: None, checkpoint: Path) -> None:
    edit(checkpoint, architectures=["AbacusForCausalLM"])
    assert complaint(vllm_config(model=str(checkpoint))) == (
        f"vLLM does not serve the model in {checkpoint}: it has no architecture AbacusForCausalLM"
    )
    assert "no checkpoint directory /nowhere" in str(complaint(vllm_config(model="/nowhere")))
    adapters = vllm_config(adapters={"tuned": "/nowhere"})
    assert complaint(adapters) == "adapter tuned: there is no directory /nowhere"
    typo = vllm_config(engine_args={"max_model_leng": 3})
    assert "vLLM does not have an engine argument max_model_leng; did you mean" in str(complaint(typo))


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


@pytest.mark.parametrize("groups", [[CacheGroup("unknown", 32)], [CHUNKED], [DRAFTED]])
def test_what_cannot_be_foretold_is_refused_and_it_says_what_serves_it(
    groups: list[CacheGroup], alone: None
) -> None:
    with pytest.raises(SettingsError, match="disable_hybrid_kv_cache_manager=true in engine_args"):
        fit(*groups)


def test_tiers_below_the_device_are_for_full_attention_alone(alone: None) -> None:
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
    groups: list[CacheGroup], alignment: int, expected: int, alone: None
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
    groups: list[CacheGroup], of_vllm: int | None, expected: int, alone: None
) -> None:
    from replicas.vllm_engine.cache_shape import CacheShape

    assert CacheShape(tuple(groups), 32, 32, 10_000, of_vllm).retention_interval == expected
