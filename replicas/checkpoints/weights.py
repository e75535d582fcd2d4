"""Checkpoint: a model directory on disk, opened for reading.

Owns the reading of safetensors files, the fingerprint and the tokenizer files. It imports torch only when a
tensor is read: the simulated engine fingerprints and bundles without it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from replicas.checkpoints.model_config import (
    CheckpointError,
    ModelConfig,
    read_eos_token_ids,
    read_json,
    read_model_config,
)
from replicas.protocol.status import TokenizerBundle

if TYPE_CHECKING:
    import torch

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "BF16", "F16")
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that determine an image's tokens and their KV."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Location of every tensor of a model. `files` maps a tensor's name to its safetensors file."""

    directory: Path
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    files: Mapping[str, Path]

    def tensor(self, name: str, shape: Sequence[int]) -> "torch.Tensor":
        """One tensor, on the CPU, as stored. Raises CheckpointError if it is absent or not of that shape."""
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                _check_header(name, file.get_slice(name), shape)
                return cast("torch.Tensor", file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read the tensor {name} from {path}: {error}") from error

    def bundle(self) -> TokenizerBundle:
        """Return the files that the model's text goes through. Raises CheckpointError."""
        return tokenizer_bundle(self.directory)

    def fingerprint(self) -> str:
        """Return a hex digest of everything that makes the KV of two models differ. Raises
        CheckpointError."""
        return files_fingerprint(self.directory)

    def _path(self, name: str) -> Path:
        path = self.files.get(name)
        if path is None:
            raise CheckpointError(f"the checkpoint {self.directory} lacks the tensor {name}")
        return path


class CheckpointHeaders(Checkpoint):
    """A checkpoint of which only headers are read: its tensors have shapes and no contents."""

    __slots__ = ()

    def tensor(self, name: str, shape: Sequence[int]) -> "torch.Tensor":
        import torch

        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                _check_header(name, file.get_slice(name), shape)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read the tensor {name} from {path}: {error}") from error
        return torch.empty(tuple(shape), device="meta")


def _check_header(name: str, header: Any, shape: Sequence[int]) -> None:
    found, dtype = tuple(header.get_shape()), header.get_dtype()
    if found != tuple(shape):
        raise CheckpointError(f"the tensor {name} has shape {found} where config.json implies {tuple(shape)}")
    if dtype not in _FLOATS:
        raise CheckpointError(f"the tensor {name} is quantized ({dtype}), which is unsupported")


def load_checkpoint(directory: Path) -> Checkpoint:
    """Read everything of a checkpoint but its tensors. Raises CheckpointError."""
    return Checkpoint(*_read_checkpoint(directory))


def load_headers(directory: Path) -> CheckpointHeaders:
    """Read a checkpoint of which only the headers are ever read. Raises CheckpointError."""
    return CheckpointHeaders(*_read_checkpoint(directory))


def _read_checkpoint(
    directory: Path,
) -> tuple[Path, ModelConfig, tuple[int, ...], dict[str, Path]]:
    config = read_model_config(directory)
    files: dict[str, Path] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                files.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path} as safetensors: {error}") from error
    return directory, config, read_eos_token_ids(directory), files


def fingerprint(directory: Path) -> str:
    """Hex digest over the config, the weights, the tokenizer, the chat template and image processing.

    Raises CheckpointError, also for a model that is none of ours to compute.
    """
    read_model_config(directory)
    return files_fingerprint(directory)


def files_fingerprint(directory: Path) -> str:
    """The same for any model: of file contents and names within the directory only.

    So a copy elsewhere has the same. Files are streamed and hashed in parallel (hashlib lets other
    threads run). Raises CheckpointError.
    """
    text_files = [directory / name for name in _bundle_names(directory)]
    processor_files = [directory / name for name in _PROCESSOR_FILES if (directory / name).is_file()]
    paths = sorted({directory / "config.json", *text_files, *processor_files, *weight_files(directory)})
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = list(pool.map(_file_digest, paths))
    combined = hashlib.sha256(b"kvasir-model-v1")
    for path, digest in zip(paths, digests, strict=True):
        combined.update(len(path.name).to_bytes(4, "little") + path.name.encode() + digest)
    return combined.hexdigest()[:32]


def tokenizer_bundle(directory: Path) -> TokenizerBundle:
    """Return the files that turn text into tokens and messages into text. Raises CheckpointError."""
    return TokenizerBundle({name: (directory / name).read_bytes() for name in _bundle_names(directory)})


def _bundle_names(directory: Path) -> list[str]:
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"there is no tokenizer.json in {directory}")
    return [name for name in _TEXT_FILES if (directory / name).is_file()]


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, each once: a single one, or those that the index
    names."""
    index = directory / _INDEX
    if not index.is_file():
        if not (directory / _WEIGHTS).is_file():
            raise CheckpointError(f"there is neither {_WEIGHTS} nor {_INDEX} in {directory}")
        return [directory / _WEIGHTS]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointError(f"{index} names the file {name}, which is not in {directory}")
    return [directory / name for name in names]


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
