"""Checkpoint directories of models that take images, without weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def write_tokenizer(
    directory: Path, words: list[str], *, merges: list[tuple[str, str]] | None = None, **options: Any
) -> Tokenizer:
    """One of bytes, with whole words besides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    for left, right in merges or []:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False, **options) for word in words]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def write_qwen(directory: Path, generation: str = "2", **images: Any) -> None:
    patch = 16 if generation == "3" else 14
    tokenizer = write_tokenizer(directory, ["<|vision_start|>", "<|image_pad|>"])
    write_json(
        directory / "config.json",
        {
            "architectures": [f"Qwen{generation}VLForConditionalGeneration"],
            "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
            "vision_config": {"patch_size": patch, "spatial_merge_size": 2},
        },
    )
    settings = {"patch_size": patch, "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessorFast"}
    write_json(directory / "preprocessor_config.json", {**settings, **images})
