"""LoRA adapters on disk: what a replica must know of one before vLLM loads it.

Owns the valid names, the test for an adapter's directory, and its fingerprint. Knows no vLLM, which reads the
weights and has its own checks.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.process.settings import SettingsError
from replicas.protocol.status import Adapter
from replicas.vllm_engine.foreign_code import check_adapter_weights

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """`rank` is the highest of any of its modules."""

    name: str
    directory: Path
    fingerprint: str
    rank: int

    @property
    def card(self) -> Adapter:
        return Adapter(self.name, self.fingerprint)


def read_adapters(
    directories: Mapping[str, Any], model_name: str, *, trust_code: bool = False
) -> tuple[LoraAdapter, ...]:
    """Return the adapters of the setting, by name. Raises SettingsError."""
    return tuple(
        _read(name, directory, model_name, trust_code) for name, directory in sorted(directories.items())
    )


def _read(name: str, directory: Any, model_name: str, trust_code: bool) -> LoraAdapter:
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"the adapter name {name!r} is not allowed: at most 64 letters, digits, '.', '_' and '-', "
            "with a letter or digit first"
        )
    if name == model_name:
        raise SettingsError(f"adapter {name} has the name of the model itself")
    if not isinstance(directory, str):
        raise SettingsError(f"adapter {name} needs a directory, not {directory!r}")
    path = Path(directory).resolve()
    if not path.is_dir():
        raise SettingsError(f"adapter {name}: there is no directory {directory}")
    rank = _rank(_config(name, path))
    if rank is None:
        raise SettingsError(f"adapter {name}: {path / _CONFIG} does not describe a LoRA adapter with a rank")
    weights = next((path / file for file in _WEIGHTS if (path / file).is_file()), None)
    if weights is None:
        raise SettingsError(f"adapter {name}: {path} holds no weights ({', '.join(_WEIGHTS)})")
    check_adapter_weights(name, weights.name, trust_code=trust_code)
    return LoraAdapter(name, path, _fingerprint(path / _CONFIG, weights), rank)


def _config(name: str, directory: Path) -> Any:
    path = directory / _CONFIG
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"adapter {name}: {directory} is not an adapter: it has no {_CONFIG}") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"adapter {name}: cannot read {path}: {error}") from error


def _rank(config: Any) -> int | None:
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        return None
    by_module = config.get("rank_pattern") or {}
    ranks: list[Any] = [config.get("r"), *(by_module.values() if isinstance(by_module, dict) else [None])]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        return None
    return int(max(ranks))


def _fingerprint(*files: Path) -> str:
    """Hash names and contents inside the directory only, so that a copy elsewhere is equal."""
    combined = hashlib.sha256(b"kvasir-adapter-v1")
    for path in files:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise SettingsError(f"cannot read {path}: {error}") from error
        combined.update(len(path.name).to_bytes(4, "little") + path.name.encode() + digest)
    return combined.hexdigest()[:32]
