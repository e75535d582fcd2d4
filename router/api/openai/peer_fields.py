"""The fields that clients of vLLM and SGLang add to OpenAI's bodies: which are honoured, and which refused.

Owns the list of those that would change what an answer means and that nothing here does. Hints may be
ignored; such a field never is. Pure.
"""

from typing import Any

import msgspec

from router.api.json_body import unsupported
from router.api.sampling import GenerationFields


class PeerFields(GenerationFields, kw_only=True):
    """Those that are refused unless they say what happens anyway, and those of structured outputs, which
    `structured_outputs.py` reads."""

    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None

    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    custom_logit_processor: Any = None
    documents: Any = None
    ec_transfer_params: Any = None
    guided_whitespace_pattern: Any = None
    input_embeds: Any = None
    input_ids: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    lora_path: Any = None
    mm_payload: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    repetition_detection: Any = None
    return_hidden_states: Any = None
    return_mm_kwargs: Any = None
    return_prompt_text: Any = None
    return_token_offsets: Any = None
    routed_experts_prompt_start: Any = None
    session_params: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None
    web_search_options: Any = None


_FIRST = PeerFields.__struct_fields__.index("allowed_token_ids")
REFUSED = PeerFields.__struct_fields__[_FIRST:]
_NONE_OF_THEM = (None,) * len(REFUSED)


def check_peer_fields(request: PeerFields) -> None:
    """Raises InvalidRequest for the first that is refused."""
    values = msgspec.structs.astuple(request)[_FIRST : _FIRST + len(REFUSED)]
    if values == _NONE_OF_THEM:  # nearly always
        return
    for parameter, value in zip(REFUSED, values, strict=True):
        if value is not None and value is not False and value != [] and value != {}:
            raise unsupported(parameter, f"'{parameter}' is not supported.")
