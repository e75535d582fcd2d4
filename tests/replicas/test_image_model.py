"""The tiny model that takes images: the same files each time, which fit together, or a clear error."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Idefics3ForConditionalGeneration, Idefics3Processor

from replicas.checkpoints.image_rules import read_image_rule
from replicas.checkpoints.weights import files_fingerprint
from replicas.protocol.images import ImageFormat, ImageSize
from replicas.toy_model.make_image_model import main, write_image_model

MAX_BYTES = 2_500_000


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


def test_where_nothing_can_be_written_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("here already")
    monkeypatch.setattr(sys, "argv", ["make_image_model", str(tmp_path / "file" / "directory")])
    with pytest.raises(SystemExit, match="cannot write the model into"):
        main()
