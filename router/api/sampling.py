"""The fields of a request that say how to continue its prompt, their limits, and SamplingParams.

Owns the limits.
"""

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from replicas.protocol.frames import SamplingParams
from replicas.protocol.sampling_defaults import PARAMETERS, SamplingDefaults
from router.answers.grammar_check import ANY_TEXT, CheckedGrammar
from router.api.caching import PromptCacheOptions, check_caching
from router.api.field_table import FieldTable
from router.api.json_body import check_range, check_salt, check_timeout, invalid, unsupported
from router.errors import ContextLengthExceeded, Excess, InvalidRequest
from router.prompt.catalog import ServedModel
from router.prompt.text_model import TextModel

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_NAMED_KEYS = 8
"""Wrong keys named in an error."""
MAX_NAME_CHARACTERS = {"prompt_cache_key": 4096, "safety_identifier": 128, "user": 4096}
"""Lengths of clients' names for caches and users."""
MAX_INTEGER = 2**31 - 1
"""Largest integer in the replicas' protocol."""


RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("priority", -MAX_INTEGER, MAX_INTEGER),
    ("top_k", -1, MAX_INTEGER),
)
"""Fields of GenerationFields that are numbers, with their bounds."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")


class StreamOptions(msgspec.Struct):
    """With `continuous_usage_stats` every chunk says what the answer has cost so far. Chunks are padded by
    nothing, whatever `include_obfuscation` says."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


stream_options_table = FieldTable(StreamOptions)


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that OpenAI's and Anthropic's bodies share; Gemini's are mapped to them in `gemini/fields.py`.

    A stop string is part of the text only with `include_stop_str_in_output`, as is the text of a token that
    ends the answer; special tokens are part of it unless `skip_special_tokens`. `truncate_prompt_tokens`
    keeps the last tokens of a prompt, or the first if `truncation_side` is "right"; -1 keeps all that fit in
    the context.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None
    cache: str | None = None
    """A named cache, which has its place taken before a request is read here."""
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    """Seconds until the answer must have begun."""
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def end_user(self) -> str | None:
        """Whom the client asks for; `user` is the field's older name, and most send that one."""
        return self.safety_identifier or self.user


def check_fields(
    request: GenerationFields,
    max_choices: int,
    *,
    least_tokens: int = 1,
    max_stop_strings: int = MAX_STOP_STRINGS,
) -> None:
    """Everything that can be judged without the prompt. Raises InvalidRequest."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            parameter="stream_options",
        )
    check_range("n", request.n, 1, max_choices)
    check_timeout(request.timeout)
    for parameter, low, high in RANGES:
        value = getattr(request, parameter)
        if value is not None:
            check_range(parameter, value, low, high)
    for parameter, least in (
        ("max_tokens", least_tokens),
        ("min_tokens", 0),
        ("truncate_prompt_tokens", -1),
    ):
        value = getattr(request, parameter)
        if value is not None and value < least:
            raise invalid(parameter, f"{value} is below {least}.")
    if request.repetition_penalty is not None and not request.repetition_penalty > 0:
        raise invalid("repetition_penalty", "it must be above 0.")
    if request.truncation_side not in (None, "left", "right"):
        raise unsupported("truncation_side", "Invalid value for 'truncation_side': it is 'left' or 'right'.")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "it is -1, or above 0.")
    if request.cache is not None:
        raise InvalidRequest("The field 'cache' must be written without escapes.", parameter="cache")
    check_salt(request.cache_salt)
    check_caching(request.prompt_cache_retention, request.prompt_cache_options)
    if request.stop is not None:
        check_stop_strings("stop", stop_strings(request.stop), max_stop_strings)
    _check_sizes(request)


def _check_sizes(request: GenerationFields) -> None:
    for parameter, most in MAX_NAME_CHARACTERS.items():
        text = getattr(request, parameter)
        if text is not None and len(text) > most:
            raise InvalidRequest(
                f"Invalid '{parameter}': it has more than {most} characters.",
                parameter=parameter,
            )
    if request.logit_bias is not None and len(request.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"Invalid 'logit_bias': at most {MAX_LOGIT_BIASES} tokens are allowed.", parameter="logit_bias"
        )
    if request.stop_token_ids is not None and len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"Invalid 'stop_token_ids': at most {MAX_STOP_TOKEN_IDS} are allowed.", parameter="stop_token_ids"
        )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def check_stop_strings(parameter: str, strings: Sequence[str], most: int) -> None:
    if len(strings) > most:
        raise InvalidRequest(
            f"Invalid '{parameter}': {len(strings)} stop strings, but at most {most} are allowed.",
            parameter=parameter,
        )
    for text in strings:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"Invalid '{parameter}': a stop string has 1 to {MAX_STOP_CHARACTERS} characters.",
                parameter=parameter,
            )


class TokenRules(NamedTuple):
    """A request's rules on single tokens: equal for all its prompts, and checked once."""

    logit_bias: tuple[tuple[int, float], ...]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, request: GenerationFields, model: TextModel) -> "TokenRules":
        """Raises InvalidRequest for what is no token of the model."""
        return cls(
            _logit_bias(request.logit_bias, model) if request.logit_bias else (),
            _stop_token_ids(request.stop_token_ids, model) if request.stop_token_ids else (),
        )


def sampling_params(
    request: GenerationFields,
    model: ServedModel,
    rules: TokenRules,
    *,
    num_prompt_tokens: int,
    max_tokens: int | None,
    num_logprobs: int | None,
    seed: int,
    prompt_parameter: str,
    grammar: CheckedGrammar = ANY_TEXT,
) -> SamplingParams:
    """Raises ContextLengthExceeded if prompt and answer do not fit."""
    defaults = model.card.sampling_defaults
    min_tokens = request.min_tokens or 0
    max_tokens = _max_tokens(model, num_prompt_tokens, max_tokens, min_tokens, prompt_parameter)
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"{min_tokens} is above the {max_tokens} tokens allowed.")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=request.top_p or 1.0,
        top_k=1 if request.top_p == 0.0 else max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=seed % 2**64,
        logit_bias=rules.logit_bias,
        stop_token_ids=rules.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
        grammar=grammar.text,
        grammar_bytes=grammar.num_bytes,
        is_seeded=request.seed is not None,
    )
    return sampling if defaults is None else _with_defaults(sampling, request, defaults)


def _with_defaults(
    sampling: SamplingParams, request: GenerationFields, defaults: SamplingDefaults
) -> SamplingParams:
    """Fill in the model's values where the client has none, and name the parameters that neither has."""
    filled: dict[str, float] = {}
    unsaid: list[str] = []
    for name in PARAMETERS:
        if getattr(request, name) is not None or (name == "top_k" and request.top_p == 0.0):
            continue
        value = getattr(defaults, name)
        if value is None:
            unsaid.append(name)
        else:
            filled[name] = value
    return msgspec.structs.replace(sampling, unsaid=tuple(unsaid), **filled)


def default_max_tokens(model: ServedModel, room: int) -> int:
    """Return the tokens of an answer whose length its client leaves open: the model's default that has room,
    else all the room."""
    defaults = model.card.sampling_defaults
    return room if defaults is None else min(room, defaults.max_new_tokens or room)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(
    model: ServedModel, num_prompt_tokens: int, max_tokens: int | None, min_tokens: int, parameter: str
) -> int:
    context_length = model.card.context_length
    check_prompt_length(context_length, num_prompt_tokens, parameter)
    if max_tokens is None:
        room = context_length - num_prompt_tokens
        return min(room, max(min_tokens, default_max_tokens(model, room)))
    if num_prompt_tokens + max_tokens > context_length:
        raise context_exceeded(
            context_length,
            num_prompt_tokens + max_tokens,
            f"you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {parameter},"
            f" {max_tokens} in the completion). Please reduce the length of the {parameter} or completion.",
            parameter,
        )
    return max_tokens


def context_exceeded(
    context_length: int, num_tokens: int, what: str, parameter: str
) -> ContextLengthExceeded:
    """In the words by which clients know it and fall back to another model."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context_length} tokens. However, {what}",
        parameter=parameter,
        excess=Excess(num_tokens, context_length),
    )


def check_prompt_length(context_length: int, num_prompt_tokens: int, parameter: str) -> None:
    if num_prompt_tokens >= context_length:
        raise context_exceeded(
            context_length,
            num_prompt_tokens,
            f"your {parameter} resulted in {num_prompt_tokens} tokens. Please reduce the length of the"
            f" {parameter}.",
            parameter,
        )


def kept_tokens(request: GenerationFields, model: TextModel, token_ids: list[int]) -> list[int]:
    """Truncate a prompt at its beginning or its end."""
    most = request.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most < 0:
        most = model.card.context_length - (request.max_tokens or 1)
    if most <= 0:
        return token_ids
    return token_ids[:most] if request.truncation_side == "right" else token_ids[-most:]


def most_tokens(model: TextModel) -> int:
    """More are not even counted: twice the context, since a text is counted in pieces, roughly."""
    return 2 * model.card.context_length


def too_many_tokens(model: TextModel, parameter: str) -> ContextLengthExceeded:
    return context_exceeded(
        model.card.context_length,
        most_tokens(model) + 1,
        f"your {parameter} resulted in more than {most_tokens(model)} tokens. Please reduce the length of the"
        f" {parameter}.",
        parameter,
    )


def bounded_tokens(model: TextModel, text: str, parameter: str, **options: bool) -> list[int]:
    """Encode a text. Raises ContextLengthExceeded, before all is encoded, for a text that is far too long."""
    check_text_length(model, text, parameter)
    token_ids = model.tokenizer.encode_within(most_tokens(model), text, **options)
    if token_ids is None:
        raise too_many_tokens(model, parameter)
    return token_ids


def check_text_length(model: TextModel, text: str, parameter: str) -> None:
    """Refuses at once what would take seconds to encode only to be found too long: no token stands
    for more characters than the longest one. Where that is not known it is encoded to see."""
    longest_token = model.tokenizer.longest_token
    if longest_token is not None and len(text) > model.card.context_length * longest_token:
        raise context_exceeded(
            model.card.context_length,
            len(text) // longest_token,
            f"your {parameter} resulted in {len(text)} characters, which are more tokens than that. Please"
            f" reduce the length of the {parameter}.",
            parameter,
        )


def _logit_bias(bias: dict[str, float], model: TextModel) -> tuple[tuple[int, float], ...]:
    most = model.card.vocab_size
    wrong = [key for key in bias if _TOKEN_ID.fullmatch(key) is None or int(key) >= most]
    if wrong:
        named = ", ".join(f"'{key[:40]}'" for key in wrong[:MAX_NAMED_KEYS])
        raise InvalidRequest(
            f"Invalid key in 'logit_bias': {named}. Token ids of this model go from 0 to {most - 1}.",
            parameter="logit_bias",
        )
    for value in bias.values():
        check_range("logit_bias", value, -100.0, 100.0)
    return tuple((int(key), value) for key, value in bias.items())


def _stop_token_ids(token_ids: list[int], model: TextModel) -> tuple[int, ...]:
    return check_token_ids(token_ids, model, "stop_token_ids")


def check_token_ids(token_ids: list[Any], model: TextModel, parameter: str) -> tuple[int, ...]:
    """Raises InvalidRequest unless all are token ids of the model."""
    try:
        return msgspec.convert(token_ids, _token_ids_below(model.card.vocab_size))
    except msgspec.ValidationError as error:
        if {int}.issuperset(map(type, token_ids)):
            raise InvalidRequest(
                f"Invalid '{parameter}': token ids of this model go from 0 to {model.card.vocab_size - 1}.",
                parameter=parameter,
            ) from error
        raise InvalidRequest(
            f"Invalid type for '{parameter}': token ids are integers.",
            parameter=parameter,
            code="invalid_type",
        ) from error


@functools.cache
def _token_ids_below(vocab_size: int) -> type[tuple[int, ...]]:
    token_id = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
    return tuple[token_id, ...]
