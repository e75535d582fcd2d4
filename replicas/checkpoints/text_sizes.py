"""TextSizes: the sizes of a model's text part, whatever its architecture and its quantisation.

Owns where families write them. The network that the torch engine computes is checked in `model_config.py`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from replicas.checkpoints.model_config import (
    CheckpointError,
    positive,
    read_fields,
    stretched_context,
    text_parts,
)
from replicas.checkpoints.tokenizer import num_ids, read_tokenizer
from replicas.checkpoints.weights import tokenizer_bundle

_VOCAB_SIZES = ("vocab_size", "padded_vocab_size")
"""The second is ChatGLM's."""
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
_LAYER_TYPES = ("layer_types", "layers_block_type", "block_types")

_SPARSE_TYPE = re.compile(r"sliding|window|chunk|linear|conv|mamba|recurrent|hybrid|compress")
"""In the names of layers that do not keep the KV of all tokens."""
_STATE_FIELD = re.compile(r"mamba|ssm|state_size|linear_attn|linear_num|hybrid_override|lightning|rwkv")
"""In the names of fields of models whose layers keep a state."""


class TextSizes(NamedTuple):
    """`longest_context` is None where config.json has none. `is_sparse` is whether its fields name windows or
    states, so that some layers keep less than all tokens."""

    vocab_size: int
    longest_context: int | None
    is_sparse: bool


def read_text_sizes(directory: Path) -> TextSizes:
    """Raises CheckpointError. Files of a model may leave out what is their family's default: a vocabulary
    then has as many ids as the tokenizer."""
    parts = text_parts(read_fields(directory))
    vocab_size = _first(parts, _VOCAB_SIZES)
    if vocab_size is None:
        tokenizer = read_tokenizer(tokenizer_bundle(directory))
        assert tokenizer is not None  # a bundle has one
        vocab_size = num_ids(tokenizer)
        if not vocab_size:
            raise CheckpointError(f"neither config.json nor tokenizer.json in {directory} has a vocabulary")
    longest = _first(parts, ("max_position_embeddings",))
    if longest is not None:
        longest = stretched_context(longest, _rope_fields(parts[0]))
    return TextSizes(vocab_size, longest, _is_sparse(parts[0], longest))


def _first(parts: Sequence[Mapping[str, Any]], names: Iterable[str]) -> int | None:
    found = ((part, name) for name in names for part in parts if part.get(name) is not None)
    return next((positive(part, name) for part, name in found), None)


def _rope_fields(part: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = part.get("rope_scaling") or part.get("rope_parameters")
    return fields if isinstance(fields, dict) else {}


def _is_sparse(part: Mapping[str, Any], longest: int | None) -> bool:
    """By the types of the layers if they are named, since families share fields that some models leave
    unused."""
    for name in _LAYER_TYPES:
        types = part.get(name)
        if isinstance(types, list) and types:
            return any(_SPARSE_TYPE.search(str(each)) for each in types)
    if any(_STATE_FIELD.search(name) and value for name, value in part.items()):
        return True
    windows = [part.get(name) for name in _WINDOWS if part.get("use_sliding_window") is not False]
    return any(isinstance(each, int) and 0 < each < (longest or each + 1) for each in windows)
