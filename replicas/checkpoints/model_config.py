"""ModelConfig: a checkpoint's `config.json`, checked and in one layout.

Owns its parsing and the list of supported families. Both spellings of the rotary settings are read:
`rope_theta` with `rope_scaling`, and the newer `rope_parameters`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_QWEN3_HEAD_DIM = 128
_MAX_JSON_BYTES = 256 * 2**20
"""Far beyond the index of any checkpoint."""


class CheckpointError(Exception):
    """The checkpoint cannot be served. The message is one sentence for its user."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles. `parameters` are those of `kind`, under the names of config.json."""

    kind: str
    theta: float
    parameters: Mapping[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.parameters.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config.json has rope type {self.kind} without a usable {name}")
        return float(value)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder: grouped-query attention, rotary positions, gated SiLU feed-forward."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    max_position_embeddings: int
    rope: RopeConfig
    has_tied_head: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    dtype_name: str

    @property
    def longest_context(self) -> int:
        """Longest context. Yarn stretches the training window; other kinds state it."""
        original = self.rope.parameters.get("original_max_position_embeddings")
        if self.rope.kind == "yarn" and original is not None and self.rope.parameters.get("factor"):
            return max(self.max_position_embeddings, int(original * self.rope.number("factor")))
        return self.max_position_embeddings


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
        if len(text) > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {_MAX_JSON_BYTES} bytes")
        content = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def read_model_config(directory: Path) -> ModelConfig:
    """Raises CheckpointError if `config.json` is absent or describes a network that we cannot run."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {directory}")
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"there is no config.json in {directory}")
    fields = read_json(path)
    family = _family(fields)
    _refuse_unsupported(fields, family)

    num_heads = _integer(fields, "num_attention_heads")
    hidden_size = _integer(fields, "hidden_size")
    default_head_dim = _QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_heads
    attention_bias = bool(fields.get("attention_bias", False)) and family != "qwen2"
    config = ModelConfig(
        family=family,
        vocab_size=_integer(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(fields, "intermediate_size"),
        num_layers=_integer(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", default=num_heads),
        head_dim=_integer(fields, "head_dim", default=default_head_dim),
        norm_epsilon=float(fields.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_integer(fields, "max_position_embeddings"),
        rope=_rope(fields),
        has_tied_head=bool(fields.get("tie_word_embeddings", False)),
        has_qkv_bias=attention_bias or family == "qwen2",
        has_output_bias=attention_bias,
        has_mlp_bias=bool(fields.get("mlp_bias", False)) and family == "llama",
        has_qk_norm=family == "qwen3",
        dtype_name=str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch."),
    )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"config.json has {config.num_heads} attention heads, which is not a multiple of its "
            f"{config.num_kv_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"config.json has an odd head_dim ({config.head_dim})")
    return config


class TextSizes(NamedTuple):
    vocab_size: int
    longest_context: int


def read_text_sizes(directory: Path) -> TextSizes:
    """Read the sizes of the text part, also for a model with a vision part, whose network we cannot run.
    Raises CheckpointError as `read_model_config` does."""
    path = directory / "config.json"
    fields = read_json(path) if path.is_file() else {}
    if "vision_config" not in fields:
        model = read_model_config(directory)
        return TextSizes(model.vocab_size, model.longest_context)
    inner = fields.get("text_config", fields)
    if not isinstance(inner, dict):
        raise CheckpointError("text_config in config.json is no object")
    return TextSizes(_integer(inner, "vocab_size"), _integer(inner, "max_position_embeddings"))


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end an answer: of `generation_config.json`, else of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        value = read_json(path).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise CheckpointError(f"{path} has an eos_token_id that is not a token id: {value!r}")
            return tuple(dict.fromkeys(ids))
    return ()


def _family(fields: Mapping[str, Any]) -> str:
    names = fields.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and fields.get("model_type") in ARCHITECTURES.values():
        return str(fields["model_type"])
    found = ", ".join(map(str, names)) or fields.get("model_type") or "none"
    raise CheckpointError(
        f"the architecture of this checkpoint is {found}; supported are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: Mapping[str, Any], family: str) -> None:
    quantization = fields.get("quantization_config") or fields.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise CheckpointError(
            f"the checkpoint is quantized ({method}); the torch engine takes float32, bfloat16 and float16"
        )
    layer_types = fields.get("layer_types") or []
    slides = bool(fields.get("use_sliding_window")) and fields.get("sliding_window") is not None
    if family != "llama" and (slides or "sliding_attention" in layer_types):
        raise CheckpointError("the checkpoint uses sliding window attention, which the torch engine lacks")
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"the checkpoint's activation is {activation}; supported is silu")


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    parameters = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise CheckpointError("the checkpoint has different rope parameters per layer, which is unsupported")
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None) or fields.get("rope_theta") or 10_000.0
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"the rope type of this checkpoint is {kind}; supported are {', '.join(ROPE_TYPES)}"
        )
    partial = parameters.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"the checkpoint rotates only a part ({partial}) of each head, unsupported")
    if kind in ("llama3", "yarn"):
        outside = fields.get("original_max_position_embeddings")
        inside = parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = (
            outside or inside or _integer(fields, "max_position_embeddings")
        )
    if kind == "yarn" and parameters.get("factor", 0) is None:
        parameters["factor"] = (
            _integer(fields, "max_position_embeddings") / parameters["original_max_position_embeddings"]
        )
    return RopeConfig(kind=str(kind), theta=float(theta), parameters=parameters)


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json has {name} {value!r}, which is not a positive whole number")
    return value
