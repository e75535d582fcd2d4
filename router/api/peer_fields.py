"""The fields that clients of vLLM, SGLang and other servers add to bodies: those of them that are refused.

Owns the list, for every dialect. Each would change what an answer means, and nothing here does it. Pure.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from router.api.field_table import NOTHING, FieldRefusal
from router.api.sampling import GenerationFields


class PeerFields(GenerationFields, kw_only=True):
    """Fields of structured outputs, which `structured_outputs.py` reads."""

    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None


class Names(NamedTuple):
    """A dialect's names for fields that others call otherwise."""

    max_tokens: str = "max_tokens"
    stop: str = "stop"
    response_format: str = "response_format"
    thinking: str = "chat_template_kwargs"
    choices: str = "n"
    seed: str = "seed"
    min_tokens: str = "min_tokens"


NOT_SERVED = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "ban_eos_token",
    "banned_strings",
    "banned_tokens",
    "chat_template",
    "custom_logit_processor",
    "custom_params",
    "custom_token_bans",
    "deferred",
    "documents",
    "early_stopping",
    "ec_transfer_params",
    "enable_search",
    "guided_whitespace_pattern",
    "input_embeds",
    "input_ids",
    "kv_transfer_params",
    "logits_processors",
    "logprob_token_ids",
    "lora_path",
    "media_io_kwargs",
    "mm_payload",
    "mm_processor_kwargs",
    "negative_prompt",
    "options",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
    "return_hidden_states",
    "return_mm_kwargs",
    "return_prompt_text",
    "return_token_offsets",
    "routed_experts_prompt_start",
    "safe_prompt",
    "samplers",
    "sampling_params",
    "session_params",
    "stop_regex",
    "structural_tag",
    "thinking_budget",
    "thinking_token_budget",
    "use_beam_search",
    "vllm_xargs",
    "watermarking",
)
NOT_SERVED_BUT = {
    "cfg_scale": 1,
    "diversity_penalty": 0,
    "do_sample": True,
    "dry_multiplier": 0,
    "dynatemp_range": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "guidance_scale": 1,
    "length_penalty": 1,
    "mirostat": 0,
    "mirostat_mode": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": 0,
    "reasoning_format": "parsed",
    "separate_reasoning": True,
    "smoothing_factor": 0,
    "tfs": 1,
    "tfs_z": 1,
    "top_a": 0,
    "top_n_sigma": -1,
    "typ_p": 1,
    "typical": 1,
    "typical_p": 1,
    "xtc_probability": 0,
}
"""With the value that changes nothing."""

PEER_HINTS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "cache_prompt",
        "client_metadata",
        "data_parallel_rank",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "guided_decoding_backend",
        "id_slot",
        "keep_alive",
        "mirostat_eta",
        "mirostat_tau",
        "request_id",
        "rid",
        "spaces_between_special_tokens",
        "stream_reasoning",
        "xtc_threshold",
    }
)
OPENAI_HINTS = PEER_HINTS | {"metadata", "moderation", "prediction", "service_tier", "store", "verbosity"}
OPENROUTER_HINTS = frozenset({"models", "provider", "route", "transforms", "usage"})
"""Other servers' fields for placement, names, and options of features that are off."""


OPENAI_NAMES = Names()


def refused_fields(kind: type[msgspec.Struct], names: Names = OPENAI_NAMES) -> Mapping[str, FieldRefusal]:
    """Return the refusals for bodies of this kind, without the fields that it honours."""
    refused = dict.fromkeys(NOT_SERVED, FieldRefusal("'{name}' is not supported."))
    for name, idle in NOT_SERVED_BUT.items():
        refused[name] = FieldRefusal(
            f"'{{name}}' is not supported: it can only be {_shown(idle)}.", idle_at(idle)
        )
    for name in ("search_parameters", "web_search_options"):  # an empty one asks for it
        refused[name] = FieldRefusal("'{name}' is not supported: nothing is searched.", (None, False))
    refused["extra_body"] = FieldRefusal(
        "'{name}' is a library's: what is in it stands at the top of a body."
    )
    for here, others in (
        (
            names.max_tokens,
            ("max_new_tokens", "max_length", "max_tokens_to_sample", "n_predict", "num_predict"),
        ),
        (names.stop, ("stop_sequences", "stop_words")),
        (names.response_format, ("format", "grammar", "grammar_string", "response_schema")),
        (names.thinking, ("enable_thinking", "think", "thinking")),
        (names.choices, ("num_return_sequences",)),
        (names.seed, ("random_seed", "sampling_seed")),
        (names.min_tokens, ("min_length", "min_new_tokens")),
        ("include_stop_str_in_output", ("no_stop_trim",)),
    ):
        refused |= {other: moved(here) for other in others}
    for name in ("rep_pen", "repeat_penalty"):
        refused[name] = moved("repetition_penalty")._replace(idle=idle_at(1))
    for name in ("min_length", "min_new_tokens"):
        refused[name] = refused[name]._replace(idle=idle_at(0))
    for name in ("enable_thinking", "think", "thinking"):  # here False is a wish
        refused[name] = refused[name]._replace(idle=(None,))
    return {name: refusal for name, refusal in refused.items() if name not in kind.__struct_encode_fields__}


def moved(here: str) -> FieldRefusal:
    """For a field that is another one in this dialect."""
    return FieldRefusal(
        f"Unsupported parameter: '{{name}}'. Here it is '{here}'.", code="unsupported_parameter"
    )


def idle_at(value: Any) -> tuple[Any, ...]:
    return (None, value) if isinstance(value, bool) else (*NOTHING, value)


def _shown(value: Any) -> str:
    return str(value).lower()
