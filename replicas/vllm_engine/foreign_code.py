"""Finds engine arguments of vLLM that would run code shipped by neither vLLM nor Kvasir.

Recognises them by name at any depth, by values that name a class by its module, and by weight formats that
are unpickled. Imports nothing of vLLM, whose own checks come later, when much has already run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replicas.process.settings import SettingsError

_NAMES = frozenset({"trust_remote_code", "logits_processors", "logging_config", "log_config_file"})
"""Arguments whose value is code or the path of some. A logging configuration may call anything."""

_ENDINGS = ("_cls", "_class_overrides", "module_path", "_plugin")

_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")

_FORMATS_WITHOUT_CODE = frozenset(
    "auto dummy fastsafetensors hf instanttensor mistral runai_streamer runai_streamer_sharded safetensors"
    " sharded_state".split()
)
"""With `auto` and `hf` safetensors are taken before anything else, and a checkpoint must have some."""

SAFE_WEIGHTS = ".safetensors"


def check_foreign_code(engine_args: Mapping[str, Any], *, trust_code: bool) -> None:
    """Raises SettingsError that names the arguments, unless the operator trusts them."""
    if trust_code:
        return
    found = sorted(set(_arguments_with_code(engine_args)))
    if found:
        raise SettingsError(
            f"engine_args sets {', '.join(found)}, which may run code that comes with a model or from"
            " elsewhere: set trust_code if you trust it"
        )


def check_adapter_weights(adapter: str, file_name: str, *, trust_code: bool) -> None:
    """Raises SettingsError for weights that are pickled, unless the operator trusts them."""
    if not trust_code and not file_name.endswith(SAFE_WEIGHTS):
        raise SettingsError(
            f"adapter {adapter}: {file_name} is pickled, and reading it may run code: convert it to"
            " safetensors, or set trust_code if you trust it"
        )


def _arguments_with_code(arguments: Mapping[str, Any]) -> Iterator[str]:
    for spelling, value in arguments.items():
        name = spelling.replace("-", "_")
        if name == "load_format" and value not in _FORMATS_WITHOUT_CODE:
            yield f"{name} {value}"
        elif _runs_code(name, value):
            yield name


def _runs_code(name: str, value: Any) -> bool:
    if value and (name in _NAMES or name.endswith(_ENDINGS)):
        return True
    if isinstance(value, str):
        return _DOTTED_NAME.fullmatch(value) is not None
    if isinstance(value, Mapping):
        return any(_runs_code(str(key).replace("-", "_"), inner) for key, inner in value.items())
    if isinstance(value, Sequence):
        return any(_runs_code("", inner) for inner in value)
    return False
