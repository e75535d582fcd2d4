"""LoRA adapters as directories: what is one, under which name, and with which fingerprint. Without vLLM."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError, build
from replicas.protocol.status import Adapter
from replicas.vllm_engine.adapters import read_adapters
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


def test_names_and_directories_of_the_setting_stay_as_they_are(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "fine-tuned")
    config = build(ReplicaConfig, {"engine": "vllm", "adapters": f"a-b_c.d={directory}"})
    assert config.adapters == {"a-b_c.d": str(directory)}


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


@pytest.mark.parametrize("directory", [None, 7, ["a"]])
def test_what_is_no_text_is_no_directory(directory: object) -> None:
    with pytest.raises(SettingsError, match="adapter tuned needs a directory"):
        read_adapters(json.loads(json.dumps({"tuned": directory})), "model")
