"""LoRA adapters as directories, and arguments that run code from elsewhere: without vLLM."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from replicas.protocol.status import Adapter
from replicas.vllm_engine.adapters import read_adapters
from replicas.vllm_engine.foreign_code import check_foreign_code
from tests.replicas.vllm_engine.lora import RANK, write_adapter


def adapter_at(directory: Path) -> Any:
    (adapter,) = read_adapters({"tuned": str(directory)}, "model")
    return adapter


def test_an_adapter_has_a_name_a_rank_and_a_fingerprint_of_its_files(tmp_path: Path) -> None:
    adapter = adapter_at(write_adapter(tmp_path / "a"))
    assert (adapter.name, adapter.rank, adapter.directory) == ("tuned", RANK, tmp_path / "a")
    assert adapter.card == Adapter("tuned", adapter.fingerprint)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("a copy, with a file that vLLM does not read")
    assert adapter_at(tmp_path / "copy").fingerprint == adapter.fingerprint
    assert adapter_at(write_adapter(tmp_path / "b", seed=2)).fingerprint != adapter.fingerprint
    assert adapter_at(write_adapter(tmp_path / "c", lora_alpha=1)).fingerprint != adapter.fingerprint


def test_the_rank_is_the_highest_of_any_module(tmp_path: Path) -> None:
    assert adapter_at(write_adapter(tmp_path / "a", rank_pattern={"q_proj": 32})).rank == 32


def test_adapters_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    directory = str(write_adapter(tmp_path / "a"))
    adapters = read_adapters({"b": directory, "a": directory}, "model")
    assert [adapter.name for adapter in adapters] == ["a", "b"]


@pytest.mark.parametrize("name", ["", "a b", "a:b", "ünï", "-a", "a/b", "x" * 65, "a\nb"])
def test_a_name_with_odd_characters_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_adapter(tmp_path / "a")
    with pytest.raises(SettingsError, match=r"^the adapter name .* is not allowed") as caught:
        read_adapters({name: str(directory)}, "model")
    assert "\n" not in str(caught.value)


def test_a_name_that_the_model_has_is_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    with pytest.raises(SettingsError, match="the name of the model itself"):
        read_adapters({"model": str(directory)}, "model")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "there is no directory"),
        ({}, "has no adapter_config.json"),
        ({"adapter_config.json": "{"}, "cannot read"),
        ({"adapter_config.json": b"\xff"}, "cannot read"),
        ({"adapter_config.json": "[]"}, "does not describe a LoRA adapter"),
        ({"adapter_config.json": '{"peft_type": "IA3", "r": 4}'}, "does not describe a LoRA adapter"),
        ({"adapter_config.json": '{"r": 0}'}, "does not describe a LoRA adapter"),
        ({"adapter_config.json": '{"r": "4"}'}, "does not describe a LoRA adapter"),
        ({"adapter_config.json": '{"r": 4, "rank_pattern": [1]}'}, "does not describe a LoRA adapter"),
        ({"adapter_config.json": '{"r": 4}'}, "holds no weights"),
    ],
)
def test_a_directory_that_is_no_adapter_is_refused(
    tmp_path: Path, files: dict[str, str | bytes] | None, sentence: str
) -> None:
    directory = tmp_path / "adapter"
    if files is not None:
        directory.mkdir()
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (directory / name).write_bytes(data)
    with pytest.raises(SettingsError, match=sentence) as caught:
        adapter_at(directory)
    assert str(caught.value).startswith("adapter tuned: ")
    assert "\n" not in str(caught.value)


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
