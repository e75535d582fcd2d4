"""Engine arguments and adapters that run code from elsewhere need the operator's word."""

from pathlib import Path
from typing import Any

import pytest

from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from replicas.vllm_engine.adapters import read_adapters
from replicas.vllm_engine.foreign_code import check_foreign_code
from tests.replicas.vllm_engine.lora import write_adapter

CONNECTOR = {"kv_connector": "Mine", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"trust-remote-code": True}, "trust_remote_code"),
        ({"load_format": "pt"}, "load_format pt"),
        ({"load_format": "npcache"}, "load_format npcache"),
        ({"load_format": "somebodys_plugin"}, "load_format somebodys_plugin"),
        ({"worker_cls": "worker.Worker"}, "worker_cls"),
        ({"worker_extension_cls": "extension.Extension"}, "worker_extension_cls"),
        ({"scheduler_cls": "scheduler.Scheduler"}, "scheduler_cls"),
        ({"distributed_executor_backend": "executor.Executor"}, "distributed_executor_backend"),
        ({"logits_processors": ["module:Processor"]}, "logits_processors"),
        ({"reasoning_parser_plugin": "/tmp/parser.py"}, "reasoning_parser_plugin"),
        ({"io_processor_plugin": "mine"}, "io_processor_plugin"),
        ({"log_config_file": "/tmp/log.json"}, "log_config_file"),
        ({"model_class_overrides": {"A": "b.C"}}, "model_class_overrides"),
        ({"kv_transfer_config": {**CONNECTOR, "kv_connector_module_path": "mine"}}, "kv_transfer_config"),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"spec-module-path": "mine"}}},
            "kv_transfer_config",
        ),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"tiers": [{"module_path": "a"}]}}},
            "kv_transfer_config",
        ),
        ({"speculative_config": {"method": "custom_class", "model": "mine.Proposer"}}, "speculative_config"),
        ({"compilation_config": {"backend": "mine.backend"}}, "compilation_config"),
        ({"hf_overrides": {"trust_remote_code": True}}, "hf_overrides"),
    ],
)
def test_an_argument_that_runs_code_is_refused_by_name_unless_it_is_trusted(
    arguments: dict[str, Any], name: str
) -> None:
    with pytest.raises(
        SettingsError, match=f"engine_args sets {name}, which may run code .*: set trust_code"
    ):
        check_foreign_code({"seed": 1, **arguments}, trust_code=False)
    check_foreign_code(arguments, trust_code=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.9, "quantization": "fp8"},
        {"trust_remote_code": False, "worker_extension_cls": "", "logits_processors": None},
        {"load_format": "safetensors", "distributed_executor_backend": "mp"},
        {"download_dir": "/models/of.mine", "revision": "v1.2"},
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
)
def test_other_arguments_need_no_trust(arguments: dict[str, Any]) -> None:
    check_foreign_code(arguments, trust_code=False)


def test_an_adapter_with_pickled_weights_is_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(SettingsError, match=r"adapter tuned: adapter_model\.bin is pickled"):
        read_adapters({"tuned": str(directory)}, "model")
    (adapter,) = read_adapters({"tuned": str(directory)}, "model", trust_code=True)
    assert adapter.name == "tuned"


def test_trust_is_for_vllm_only() -> None:
    with pytest.raises(SettingsError, match="trust_code is for the engine vllm"):
        ReplicaConfig(trust_code=True)
