"""Tiny models with several caches or with images, and the proof of sparse ones."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers import Idefics3ForConditionalGeneration, Idefics3Processor

from replicas.checkpoints.image_rules import read_image_rule
from replicas.checkpoints.weights import files_fingerprint, tokenizer_bundle
from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from replicas.errors import StartupError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.events import CacheEvent, ResumePointsChanged
from replicas.protocol.frames import StepFrame
from replicas.protocol.images import ImageFormat, ImageSize
from replicas.toy_model import toy_model_path
from replicas.toy_model.make_hybrid_model import FAMILIES, main, write_hybrid_model
from replicas.toy_model.make_image_model import write_image_model

MAX_BYTES = 2_500_000


@pytest.mark.parametrize("family", FAMILIES)
def test_each_is_small_and_made_the_same_each_time(family: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_hybrid_model(family, tmp_path / name)
    one = tmp_path / "one"
    assert sum(path.stat().st_size for path in one.iterdir()) < MAX_BYTES
    assert files_fingerprint(one) == files_fingerprint(tmp_path / "two")
    assert tokenizer_bundle(one).files["tokenizer.json"] == (toy_model_path() / "tokenizer.json").read_bytes()
    config = json.loads((one / "config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM")


def test_the_command_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "new"
    done = subprocess.run(
        [sys.executable, "-m", "replicas.toy_model.make_hybrid_model", "mistral", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    assert (path / "model.safetensors").exists()


def test_where_nothing_can_be_written_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("here already")
    monkeypatch.setattr(sys, "argv", ["make_hybrid_model", "mistral", str(tmp_path / "file" / "directory")])
    with pytest.raises(SystemExit, match="cannot write the model into"):
        main()


Change = Callable[[CacheEvent], CacheEvent]


def engine(groups: str) -> Engine:
    config = ReplicaConfig(
        engine="simulated", num_blocks=128, simulated_groups=groups, simulated_hardware="instant"
    )
    return build_engine(config)[0]


def telling(engine: Engine, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    step = engine.step

    def changed() -> StepFrame:
        frame = step()
        return msgspec.structs.replace(frame, events=[change(event) for event in frame.events])

    monkeypatch.setattr(engine, "step", changed)


def without_points(event: CacheEvent) -> CacheEvent:
    return ResumePointsChanged() if isinstance(event, ResumePointsChanged) else event


def misnamed(event: CacheEvent) -> CacheEvent:
    if not isinstance(event, ResumePointsChanged):
        return event
    return ResumePointsChanged(tuple(BlockHash(bytes(HASH_BYTES)) for _ in event.added), event.removed)


@pytest.mark.parametrize("groups", ["window:16:40 full:16", "window:16:40"])
def test_points_and_reach_prove_the_hashes(groups: str) -> None:
    assert prove_hashes(engine(groups), random.Random(0)) > 0


@pytest.mark.parametrize("groups", ["window:16:40 full:16", "window:16:40"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_points, "cannot resume the probe prompt"),
        (misnamed, "with other hashes than routers compute"),
    ],
)
def test_points_that_are_missing_or_misnamed_are_refused(
    groups: str, change: Change, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine(groups)
    telling(built, change, monkeypatch)
    with pytest.raises(StartupError, match=sentence):
        prove_hashes(built, random.Random(0))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command, with as many threads as torch takes."""
    path = tmp_path_factory.mktemp("model") / "new"
    without = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "replicas.toy_model.make_image_model", str(path)],
        env={**without, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{path}\n"
    return path


def test_the_model_is_small_and_made_the_same_each_time(directory: Path, tmp_path: Path) -> None:
    assert sum(path.stat().st_size for path in directory.iterdir()) < MAX_BYTES
    write_image_model(tmp_path)
    assert files_fingerprint(tmp_path) == files_fingerprint(directory)
    for path in directory.iterdir():
        twin = tmp_path / path.name
        assert hashlib.sha256(twin.read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest(), path


def test_the_model_takes_as_many_tokens_as_its_rule_says(directory: Path) -> None:
    rule, reason = read_image_rule(directory)
    assert rule is not None, reason
    processor: Any = Idefics3Processor.from_pretrained(directory)
    model: Any = Idefics3ForConditionalGeneration.from_pretrained(directory)
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == "<|im_start|>user\n<image>What is it?<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=text, images=[[Image.new("RGB", (300, 200))]], return_tensors="pt")
    expansion = rule.tokens_of(ImageSize(ImageFormat.PNG, 300, 200))
    assert len(expansion) == 94
    assert inputs["input_ids"].shape[1] == len(processor.tokenizer(text)["input_ids"]) + 93
    with torch.inference_mode():
        assert model(**inputs).logits.isfinite().all()


def test_without_transformers_the_command_says_what_it_needs(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.argv[1:] = ['x']\n"
        "from replicas.toy_model.make_image_model import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this needs transformers and torch, which come with vLLM")
    assert "Traceback" not in done.stderr
