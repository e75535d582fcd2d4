"""A server's model is whatever it serves: of its files only the sizes of the text part are read."""

import importlib.util
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.checkpoints.model_config import read_eos_token_ids
from replicas.checkpoints.text_sizes import TextSizes, read_text_sizes
from replicas.config import SERVERS, ReplicaConfig
from replicas.loadable import complaint, files_complaint
from replicas.toy_model import toy_model_path

NUM_TOY_IDS = 2048

NOT_TORCH = ("remote", "openai", "simulated")
"""Engines that compute nothing with a checkpoint."""

FAMILIES: dict[str, tuple[dict[str, Any], TextSizes]] = {
    "GptOssForCausalLM": (
        {
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        },
        TextSizes(201088, 262144, is_sparse=True),
    ),
    "DeepseekV3ForCausalLM": (
        {"vocab_size": 129280, "max_position_embeddings": 163840, "kv_lora_rank": 512},
        TextSizes(129280, 163840, is_sparse=False),
    ),
    "MiniMaxM2ForCausalLM": (
        {"vocab_size": 200064, "attn_type_list": [1, 1], "layernorm_linear_attention_beta": 1.0},
        TextSizes(200064, None, is_sparse=False),
    ),
    "MistralForCausalLM": ({"vocab_size": 32000, "sliding_window": 4096}, TextSizes(32000, None, True)),
    "Gemma2ForCausalLM": (
        {"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096},
        TextSizes(256000, 8192, is_sparse=True),
    ),
    "Phi3ForCausalLM": (
        {
            "vocab_size": 32064,
            "max_position_embeddings": 131072,
            "sliding_window": 262144,
            "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            "hidden_act": "gelu",
        },
        TextSizes(32064, 131072, is_sparse=False),
    ),
    "Qwen2ForCausalLM": (
        {"vocab_size": 152064, "sliding_window": 4096, "use_sliding_window": False},
        TextSizes(152064, None, is_sparse=False),
    ),
    "Qwen3NextForCausalLM": (
        {"vocab_size": 151936, "linear_num_value_heads": 32},
        TextSizes(151936, None, is_sparse=True),
    ),
    "KimiLinearForCausalLM": (
        {"vocab_size": 163840, "linear_attn_config": {"kda_layers": [1]}},
        TextSizes(163840, None, is_sparse=True),
    ),
    "GraniteMoeHybridForCausalLM": (
        {"vocab_size": 100352, "mamba_d_state": 128, "layer_types": ["attention", "attention"]},
        TextSizes(100352, None, is_sparse=False),
    ),
    "NemotronHForCausalLM": (
        {"vocab_size": 131072, "hybrid_override_pattern": "M-M*"},
        TextSizes(131072, None, is_sparse=True),
    ),
    "Llama4ForConditionalGeneration": (
        {"text_config": {"vocab_size": 202048, "attention_chunk_size": 8192}, "vision_config": {}},
        TextSizes(202048, None, is_sparse=True),
    ),
    "Qwen2VLForConditionalGeneration": (
        {"vocab_size": 152064, "vision_config": {"vocab_size": 7}, "text_config": None},
        TextSizes(152064, None, is_sparse=False),
    ),
    "Ovis2ForConditionalGeneration": (
        {"vocab_size": 151643, "text_config": {"vocab_size": 151936}, "vision_config": {"vocab_size": 16384}},
        TextSizes(151936, None, is_sparse=False),
    ),
    "InternVLChatModel": ({"llm_config": {"vocab_size": 92553}}, TextSizes(92553, None, False)),
    "DeepseekVLV2ForCausalLM": (
        {"language_config": {"vocab_size": 129280}},
        TextSizes(129280, None, is_sparse=False),
    ),
    "Qwen3OmniMoeForConditionalGeneration": (
        {
            "thinker_config": {"text_config": {"vocab_size": 151936, "max_position_embeddings": 65536}},
            "talker_config": {"text_config": {"vocab_size": 3072}},
        },
        TextSizes(151936, 65536, is_sparse=False),
    ),
    "ChatGLMModel": ({"padded_vocab_size": 65024, "seq_length": 8192}, TextSizes(65024, None, False)),
    # As published: what is the family's default is left out.
    "Gemma3ForConditionalGeneration": (
        {"text_config": {"hidden_size": 2560, "sliding_window": 1024}, "vision_config": {"image_size": 896}},
        TextSizes(NUM_TOY_IDS, None, is_sparse=True),
    ),
}

QUANTIZATIONS: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "gptq_v2", "checkpoint_format": "gptq_v2"},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True},
    {"quant_method": "compressed-tensors", "config_groups": {}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "fbgemm_fp8"},
    {"quant_method": "auto-round"},
    {"quant_method": "torchao", "quant_type": {"default": {}}},
    {"quant_method": "quark"},
    {"quant_method": "hqq"},
    {"quant_algo": "FP8"},
)


OF_VLLM = (
    *("bailing_moe_v3_vl", "chatglm", "deepseek_vl_v2", "dots3_note", "isaac", "kimi_k25", "kimi_k3"),
    *("kimi_vl", "midashenglm", "minimax_m3_vl", "moondream3", "qwen3_asr", "step3_text", "step3_vl"),
)
"""Families whose configuration vLLM has itself."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("*.py", "corpus", "__pycache__")
    return Path(shutil.copytree(toy_model_path(), tmp_path / "model", ignore=ignored))


def write(model: Path, name: str = "config.json", **fields: Any) -> None:
    (model / name).write_text(json.dumps(fields))


def said_of(engine: str, model: Path) -> list[str | None]:
    url = "http://127.0.0.1:1" if engine in SERVERS else None
    config = ReplicaConfig(engine=engine, model=str(model), engine_url=url)
    return [files_complaint(config), complaint(config)]


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_every_family_are_taken_by_engines_that_do_not_compute_them(name: str, model: Path) -> None:
    fields, sizes = FAMILIES[name]
    write(model, architectures=[name], **fields)
    assert read_text_sizes(model) == sizes
    for engine in NOT_TORCH:
        assert said_of(engine, model) == [None, None]


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=lambda each: next(iter(each.values())))
def test_quantised_models_are_taken_by_engines_that_do_not_compute_them(
    quantization: dict[str, Any], model: Path
) -> None:
    fields = json.loads((model / "config.json").read_text())
    for place in ("quantization_config", "compression_config"):
        write(model, **fields, **{place: quantization})
        for engine in NOT_TORCH:
            assert said_of(engine, model) == [None, None]
        assert "is quantized" in str(files_complaint(ReplicaConfig(model=str(model))))


@pytest.mark.parametrize("engine", NOT_TORCH)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "there is no config.json in"),
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"vocab_size": "many"}', "config.json has vocab_size 'many', which is not a positive whole number"),
        ('{"text_config": {"vocab_size": -1}}', "config.json has vocab_size -1"),
        ('{"vocab_size": 9, "max_position_embeddings": 0}', "config.json has max_position_embeddings 0"),
    ],
)
def test_a_config_that_cannot_be_used_is_named_in_one_sentence(
    engine: str, config: str | None, words: str, model: Path
) -> None:
    (model / "config.json").unlink()
    if config is not None:
        (model / "config.json").write_text(config)
    for said in said_of(engine, model):
        assert said is not None and words in said and "\n" not in said


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([2, 0], 1, "<|im_end|>", (2, 0)),
        (0, 1, "<|im_end|>", (0, 2)),
        (None, {"text_config": {"eos_token_id": 1}}, {"content": "<|im_end|>"}, (1, 2)),
        (None, {"eos_token_id": 0, "text_config": {"eos_token_id": 1}}, None, (0,)),
        (None, {}, "<|im_end|>", (2,)),
        (None, {}, "no token", ()),
    ],
)
def test_answers_end_where_a_server_ends_them(
    generation: Any, config: Any, tokenizer: Any, expected: tuple[int, ...], model: Path
) -> None:
    """At the tokens of the model's files, and at its tokenizer's own."""
    write(model, "generation_config.json", eos_token_id=generation)
    write(model, **(config if isinstance(config, dict) else {"eos_token_id": config}))
    write(model, "tokenizer_config.json", eos_token=tokenizer)
    assert read_eos_token_ids(model) == expected


def known_to_vllm() -> Iterator[tuple[str, Any]]:
    """Configurations of the generating models that vLLM has code for, with their families' defaults."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry
    from vllm.transformers_utils import config as vllm_config

    ours = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    served = ours & {*ModelRegistry.get_supported_archs()}
    named = (getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES"))
    kinds = {
        kind
        for mapping in named
        for kind, names in mapping.items()
        if not served.isdisjoint([names] if isinstance(names, str) else names)
    }
    for kind in sorted(kinds & {*CONFIG_MAPPING}):
        yield kind, CONFIG_MAPPING[kind]()
    for kind in OF_VLLM:
        yield kind, vllm_config._CONFIG_REGISTRY[kind]()


@pytest.mark.vllm
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: ./kvasir test --all installs it",
)
def test_the_vocabulary_of_each_family_is_the_one_that_vllm_reads(model: Path) -> None:
    """From files as transformers writes them, with all fields and with those that differ from defaults."""
    from vllm.transformers_utils.config import get_hf_text_config

    tried = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, config in known_to_vllm():
            expected = getattr(get_hf_text_config(config), "vocab_size", None)
            for fields in (config.to_dict(), config.to_diff_dict()):
                text = json.dumps(fields, default=str)
                (model / "config.json").write_text(text)
                found = read_text_sizes(model).vocab_size
                assert found == (expected if "vocab_size" in text else NUM_TOY_IDS), kind
            tried.append(kind)
    assert len(tried) > 100, tried
    assert {"gpt_oss", "deepseek_v3", "gemma3", "qwen3_omni_moe", "mistral3", "nemotron_h"} <= {*tried}
