"""A model's sampling defaults: what its file says, what the settings put in its place, and files that lie."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from replicas.checkpoints import model_config
from replicas.checkpoints.model_config import CheckpointError
from replicas.checkpoints.sampling_defaults import read_sampling_defaults
from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError, build
from replicas.protocol.sampling_defaults import NAMES, SamplingDefaults
from tests.own_log import own_records

QWEN = {"do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.95, "top_k": 20}


def read(folder: Path, content: str | None, **settings: Any) -> dict[str, float] | None:
    path = folder / "generation_config.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    found = read_sampling_defaults(build(ReplicaConfig, settings), folder)
    return None if found is None else dict(found.given())


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        (QWEN, {}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (QWEN, {"sampling_override": "temperature=0.2"}, {"temperature": 0.2, "top_p": 0.95, "top_k": 20}),
        (QWEN, {"sampling_override": "top_k=-1,top_p=null"}, {"temperature": 0.6, "top_k": 0}),
        (QWEN, {"sampling_defaults": "neutral"}, None),
        ({**QWEN, "max_new_tokens": 512}, {"sampling_override": dict.fromkeys(NAMES)}, None),
        ({"eos_token_id": 1}, {}, None),
        ({"eos_token_id": 1}, {"sampling_override": "max_new_tokens=5"}, {"max_new_tokens": 5}),
        (None, {"sampling_override": {"min_p": 0.1}}, {"min_p": 0.1}),
        (None, {}, None),
        ({"temperature": 0, "top_k": None, "do_sample": False}, {}, {"temperature": 0.0}),
    ],
)
def test_the_settings_win_over_the_file(
    tmp_path: Path, fields: dict[str, Any] | None, settings: dict[str, Any], expected: object
) -> None:
    content = None if fields is None else json.dumps(fields)
    assert read(tmp_path, content, **settings) == expected


def test_beside_an_override_neutral_says_all_the_others(tmp_path: Path) -> None:
    settings = {"sampling_defaults": "neutral", "sampling_override": "temperature=0.5"}
    neutral = SamplingDefaults(0.5, 1.0, 0, 0.0, 1.0, 0.0, 0.0)
    assert read(tmp_path, json.dumps(QWEN), **settings) == dict(neutral.given())


def test_values_that_cannot_be_are_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {
        "temperature": "1e9",
        "top_k": '"many"',
        "min_p": "NaN",
        "repetition_penalty": "1e999",
        "presence_penalty": "true",
        "frequency_penalty": f'"{"x" * 10_000}"',
        "max_new_tokens": "1" * 400,
    }
    content = ", ".join(f'"{name}": {value}' for name, value in wrong.items())
    assert read(tmp_path, f'{{"top_p": 0.9, {content}}}') == {"top_p": 0.9}
    (record,) = own_records(caplog, logging.WARNING)
    assert all(name in record.getMessage() for name in wrong) and len(record.getMessage()) < 4000


def test_a_file_that_is_none_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("[" * 100_000, "{", "[1]"):
        with pytest.raises(CheckpointError, match="JSON"):
            read(tmp_path, content)
    monkeypatch.setattr(model_config, "_MAX_JSON_BYTES", 20)
    with pytest.raises(CheckpointError, match="more than 20 bytes"):
        read(tmp_path, json.dumps(QWEN))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampling_defaults": "openai"}, "model or neutral, not openai"),
        ({"sampling_override": {"temprature": 1}}, "has temprature; it takes temperature, top_p"),
        ({"sampling_override": "temperature=hot"}, "temperature cannot be 'hot': Expected `float`"),
        ({"sampling_override": "top_p=0"}, "top_p cannot be 0: Expected `float` > 0"),
        (
            {"engine": "openai", "engine_url": "http://a:1", "sampling_override": "top_p=0.5"},
            "its server decides",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        build(ReplicaConfig, settings)
