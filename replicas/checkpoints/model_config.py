"""ModelConfig: a checkpoint's `config.json`, checked and in one layout.

Owns its parsing and the list of supported families. Both spellings of the rotary settings are read:
`rope_theta` with `rope_scaling`, and the newer `rope_parameters`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_QWEN3_HEAD_DIM = 128
_MAX_JSON_BYTES = 256 * 2**20
"""Far beyond the index of any checkpoint."""
_MAX_STRETCH = 10_000


class _AddedToken(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=0)]
    content: str


class _AddedTokens(msgspec.Struct):
    """The part of `tokenizer.json` that has all special tokens."""

    added_tokens: list[_AddedToken] = []


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
        return stretched_context(
            self.max_position_embeddings, {**self.rope.parameters, "rope_type": self.rope.kind}
        )


def stretched_context(longest: int, rope: Mapping[str, Any]) -> int:
    """Longest context. Yarn stretches the training window; other kinds state it. Raises CheckpointError."""
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    is_yarn = "yarn" in (rope.get("rope_type"), rope.get("type"))
    if not is_yarn or not isinstance(original, int) or not isinstance(factor, int | float):
        return longest
    if not 0 <= factor <= _MAX_STRETCH:  # nor is NaN
        raise CheckpointError(f"config.json has the yarn factor {factor}, which is not 0 to {_MAX_STRETCH:,}")
    return max(longest, int(original * factor))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint. Raises CheckpointError."""
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


def read_fields(directory: Path) -> dict[str, Any]:
    """Return the object in a checkpoint's `config.json`. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {directory}")
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"there is no config.json in {directory}")
    return read_json(path)


def read_model_config(directory: Path) -> ModelConfig:
    """Raises CheckpointError if `config.json` is absent or describes a network that we cannot run."""
    fields = read_fields(directory)
    family = _family(fields)
    _refuse_unsupported(fields, family)

    num_heads = positive(fields, "num_attention_heads")
    hidden_size = positive(fields, "hidden_size")
    default_head_dim = _QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_heads
    attention_bias = bool(fields.get("attention_bias", False)) and family != "qwen2"
    config = ModelConfig(
        family=family,
        vocab_size=positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(fields, "intermediate_size"),
        num_layers=positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=positive(fields, "num_key_value_heads", default=num_heads),
        head_dim=positive(fields, "head_dim", default=default_head_dim),
        norm_epsilon=float(fields.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=positive(fields, "max_position_embeddings"),
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


_TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")


def text_parts(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the fields of the part that reads and writes text, then those around it: families with images or
    sound nest it."""
    parts = [fields]
    while True:
        inner = (parts[0].get(name) for name in _TEXT_PARTS)
        found = next((each for each in inner if isinstance(each, dict)), None)
        if found is None:
            return parts
        parts.insert(0, found)


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer, as servers have them: those of `generation_config.json`, else of
    `config.json`, and the tokenizer's own."""
    return tuple(dict.fromkeys((*_declared_eos(directory), *_tokenizer_eos(directory))))


def _declared_eos(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        parts = text_parts(read_json(path)) if path.is_file() else []
        for fields in reversed(parts):
            value = fields.get("eos_token_id")
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if not all(isinstance(token, int) and token >= 0 for token in ids):
                    raise CheckpointError(f"{path} has an eos_token_id that is not a token id: {value!r}")
                return ids
    return []


def _tokenizer_eos(directory: Path) -> list[int]:
    """None from files that cannot be read: who needs the tokenizer complains of them."""
    config, tokenizer = directory / "tokenizer_config.json", directory / "tokenizer.json"
    said = read_json(config).get("eos_token") if config.is_file() else None
    text = said.get("content") if isinstance(said, dict) else said
    if not text or not tokenizer.is_file():
        return []
    try:
        added = msgspec.json.decode(tokenizer.read_bytes(), type=_AddedTokens).added_tokens
    except (msgspec.MsgspecError, RecursionError):
        return []
    return [token.id for token in added if token.content == text]


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
            outside or inside or positive(fields, "max_position_embeddings")
        )
    if kind == "yarn" and parameters.get("factor", 0) is None:
        parameters["factor"] = (
            positive(fields, "max_position_embeddings") / parameters["original_max_position_embeddings"]
        )
    return RopeConfig(kind=str(kind), theta=float(theta), parameters=parameters)


def positive(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json has {name} {value!r}, which is not a positive whole number")
    return value
