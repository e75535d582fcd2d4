"""FieldTables of Gemini's bodies: fields that are honoured, hints, or refused.

Owns the lists. Google's parser takes each field in two spellings, so both are listed.
"""

import re
from collections.abc import Iterable

from msgspec import Struct

from router.api.field_table import FieldRefusal, FieldTable
from router.api.gemini.fields import CountTokens, GenerateContent, GenerationConfig, ThinkingConfig
from router.api.peer_fields import PEER_HINTS, Names, PeerFields, idle_at, moved, refused_fields
from router.api.sampling import GenerationFields


def _both_spellings(names: Iterable[str]) -> dict[str, str]:
    """Each as it is and as the other one has it, and what it is."""
    found: dict[str, str] = {}
    for name in names:
        first, *rest = name.split("_")
        found |= {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name): name}
        found |= {"".join([first, *(word.capitalize() for word in rest)]): name, name: name}
    return found


def _refused(kind: type[Struct], **own: FieldRefusal) -> dict[str, FieldRefusal]:
    config = "generationConfig."
    names = Names(
        f"{config}maxOutputTokens",
        f"{config}stopSequences",
        f"{config}responseJsonSchema",
        f"{config}thinkingConfig",
        f"{config}candidateCount",
        f"{config}seed",
    )
    not_served = FieldRefusal("'{name}' is not supported.")
    formats = ("response_format", *PeerFields.__struct_fields__[len(GenerationFields.__struct_fields__) :])
    refused = {
        **refused_fields(kind, names),
        **dict.fromkeys(formats, moved(names.response_format)),
        **dict.fromkeys(("best_of", "echo", "logit_bias", "min_p", "min_tokens", "suffix"), not_served),
        **dict.fromkeys(("ignore_eos", "no_stop_trim", "repetition_penalty"), not_served),
        **dict.fromkeys(("rep_pen", "repeat_penalty"), not_served._replace(idle=idle_at(1))),
        **dict.fromkeys(("min_length", "min_new_tokens"), not_served._replace(idle=idle_at(0))),
        **dict.fromkeys(("stop_token_ids", "chat_template_kwargs", "top_logprobs"), not_served),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), moved(names.max_tokens)),
        **dict.fromkeys(("reasoning_effort", "reasoning"), moved(names.thinking)),
        "n": moved(names.choices),
        "stop": moved(names.stop),
        **own,
    }
    spelt = {other: refused[name] for other, name in _both_spellings(refused).items()}
    honoured = {*kind.__struct_encode_fields__, *kind.__struct_fields__}
    return {name: refusal for name, refusal in spelt.items() if name not in honoured}


_THINKING = FieldTable(ThinkingConfig, hints=_both_spellings(["thinkingLevel"]))
GENERATION_CONFIG = FieldTable(
    GenerationConfig,
    hints=_both_spellings(
        PEER_HINTS
        | {"audioTimestamp", "enableAffectiveDialog", "enableEnhancedCivicAnswers", "mediaResolution"}
        | {"modelConfig", "modelSelectionConfig", "routingConfig"}
    ),
    refused={
        **_refused(GenerationConfig, translation_config=FieldRefusal("'{name}' is not supported.")),
        "_responseJsonSchema": moved("generationConfig.responseJsonSchema"),
    },
    inner={"thinkingConfig": _THINKING},
)
_TOP_HINTS = _both_spellings(PEER_HINTS | {"labels", "safetySettings", "serviceTier", "store"})
_TOP_REFUSED = _refused(
    GenerateContent,
    **{name: moved(f"generationConfig.{name}") for name in GenerationConfig.__struct_encode_fields__},
    **dict.fromkeys(("input", "messages", "prompt"), moved("contents")),
    **dict.fromkeys(("instructions", "system"), moved("systemInstruction")),
    **dict.fromkeys(("function_call", "functions"), moved("tools")),
    tool_choice=moved("toolConfig"),
)
GENERATE = FieldTable(
    GenerateContent, hints=_TOP_HINTS, refused=_TOP_REFUSED, inner={"generationConfig": GENERATION_CONFIG}
)
COUNT = FieldTable(
    CountTokens,
    hints=_TOP_HINTS,
    refused=_TOP_REFUSED,
    inner={"generationConfig": GENERATION_CONFIG, "generateContentRequest": GENERATE},
)
