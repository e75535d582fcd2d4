"""What vLLM cannot start with: one clear sentence, an exit code, and never a lease."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from replicas.__main__ import EXIT_NOT_STARTED, main
from replicas.engine_process.build import build_engine
from replicas.errors import StartupError
from replicas.process.settings import SettingsError
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
        ({"block_size": 100}, "needs a multiple of 32"),
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
    environment: None, settings: dict[str, Any], sentence: str
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
    environment: None, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "{other_model}"], "vLLM cannot serve"),
        (["--block-size", "48"], "setting block_size is 48"),
        (["--num-blocks", "2"], "raise num_blocks or kv_cache_bytes"),
        (["--adapters", "tuned=/nowhere"], "adapter tuned: there is no directory /nowhere"),
        (["--engine-args", "enable-chunked-prefill=false"], "is smaller than max_model_len"),
    ],
)
def test_what_cannot_start_is_one_sentence_an_exit_code_and_never_a_lease(
    environment: None,
    redis_url: str,
    other_model: Path,
    arguments: list[str],
    sentence: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    filled = [argument.format(other_model=other_model) for argument in arguments]
    assert main(["--engine", "vllm", "--redis-url", redis_url, *filled], {}) == EXIT_NOT_STARTED
    said = capfd.readouterr().err.splitlines()
    assert sentence in said[-1]
    assert not any("Traceback" in line for line in said)
    assert asyncio.run(keys_of(redis_url)) == []


async def keys_of(redis_url: str) -> list[bytes]:
    redis = connect(redis_url)
    keys: list[bytes] = await redis.keys("*")
    await redis.aclose()
    return keys
