"""Chats: the one way of every dialect from a body to a conversation that can run.

Owns what is done beside the event loop and what in a process of its own. Knows no dialect: how a body is read
and an answer is written is given.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from router.answers.parser import AnswerParser, new_parser
from router.answers.wishes import ToolMode
from router.api.api_request import AnswerWriter, ApiRequest, OutputWishes, Prompt, make_prompt
from router.api.asked import Asked, Prepare
from router.api.body_weight import is_light_chat
from router.api.chat_history import Begun, TailOf
from router.api.chat_prompt import encoded_prompt, render_chat, shown_chat
from router.api.chat_request import ChatRequest
from router.api.context import ApiContext
from router.api.conversation import encoded_history, encoded_tail
from router.api.grammar_checks import chat_grammar
from router.api.preparing import READERS
from router.api.sampling import TokenRules, check_text_length, kept_tokens, sampling_params
from router.caller import Caller
from router.errors import about_model
from router.prepared import EncodedPrompt, PreparedRequest
from router.prompt.catalog import ServedModel
from router.prompt.engines import TooMuchWork

_request_decoder = msgspec.msgpack.Decoder(ChatRequest)


class Chat(NamedTuple):
    """A conversation as the writer of its answer sees it."""

    context: ApiContext
    request: ChatRequest
    model: ServedModel
    prompt: Prompt


NewWriter = Callable[[Chat], AnswerWriter]


class _Read(NamedTuple):
    """`token_ids` are those that `encoded` has packed. `tail_of` says what stands behind an answer in it."""

    request: ChatRequest
    encoded: EncodedPrompt
    token_ids: list[int]
    tail_of: TailOf


def prepare_chats(kind: str, new_writer: NewWriter) -> Prepare:
    """For bodies of a kind in READERS."""

    async def prepare(context: ApiContext, asked: Asked) -> ApiRequest:
        """Raises InvalidRequest, UnknownModel or RouterBusy."""
        read = await _read(context, kind, asked)
        context.unknown_fields.count(kind, read.request.unknown_fields)
        with about_model(read.request.model):
            model = context.catalog.get(read.request.model).bounded(asked.caller.max_context)
            history, asking = context.history, (model, asked.caller, read.request, read.encoded)
            begun = history.begin(*asking)
            if begun is not None and history.is_elsewhere(begun, read.encoded):
                begun = await history.ask_elsewhere(*asking, begun, context.turns.long_work())
            return _answer(context, asked.caller, model, read, begun, new_writer)

    return prepare


async def _read(context: ApiContext, kind: str, asked: Asked) -> _Read:
    if is_light_chat(asked.body):
        try:
            return await _encode(context, kind, asked)
        except TooMuchWork:
            pass
    prepared = await context.offload.prepare(kind, asked.body, asked.address)
    assert isinstance(prepared, PreparedRequest)
    (encoded,) = prepared.prompts
    tail = None if encoded.history is None else encoded.history.tail
    tails = {} if tail is None else {tail.position: tail}
    return _Read(_request_decoder.decode(prepared.fields), encoded, encoded.ids(), tails.get)


async def _encode(context: ApiContext, kind: str, asked: Asked) -> _Read:
    """Here and now; only what is long and new is encoded in a thread. Raises TooMuchWork."""
    request = READERS[kind](asked.body, context.config.max_choices)
    namespace, salt = asked.caller.namespace, request.cache_salt
    model = context.catalog.get(request.model).within(namespace, salt).bounded(asked.caller.max_context)
    with about_model(request.model):
        chat = render_chat(model, request, is_bounded=True)
        check_text_length(model, chat.text, request.messages_field)
        token_ids = await model.tokenizer.encode_async(chat.text, is_quoted=chat.is_quoted)
        wished = chat_grammar(model, request, starts_in_reasoning=chat.starts_in_reasoning)
        shown = shown_chat(model, request, token_ids)
        kept = kept_tokens(request, model, shown.token_ids)
        encoded = encoded_prompt(
            model,
            request,
            chat,
            shown,
            kept,
            grammar=await context.grammars.checked(wished, (namespace, salt), asked.share_owner),
            history=encoded_history(request) if context.history.is_on else None,
        )
    return _Read(request, encoded, kept, partial(encoded_tail, model, chat))


def _answer(
    context: ApiContext,
    caller: Caller,
    model: ServedModel,
    read: _Read,
    begun: Begun | None,
    new_writer: NewWriter,
) -> ApiRequest:
    request, token_ids = read.request, read.token_ids
    encoded, turn = context.history.go_on(model, caller, request, read.encoded, read.tail_of, begun)
    if encoded is not read.encoded:
        token_ids = encoded.ids()
    sampling = sampling_params(
        request,
        model,
        TokenRules.of(request, model),
        num_prompt_tokens=len(token_ids),
        max_tokens=_max_tokens(request, model.card.context_length - len(token_ids)),
        num_logprobs=request.num_logprobs,
        seed=context.rng.getrandbits(64) if request.seed is None else request.seed,
        prompt_parameter=request.messages_field,
        grammar=encoded.grammar,
    )
    prompt = make_prompt(
        context,
        caller,
        model,
        request,
        token_ids,
        sampling,
        _output_wishes(model, request, encoded, is_remembered=turn is not None),
        packed_tokens=encoded.token_ids,
        keeps=encoded.keeps,
        num_stable_tokens=encoded.num_stable_tokens,
        images=encoded.images,
        grammar_seconds=encoded.grammar.seconds,
    )
    prompt.turn, prompt.outline = turn, encoded.outline
    writer = new_writer(Chat(context, request, model, prompt))
    return ApiRequest(model, [prompt], bool(request.stream), writer, compared_id=request.compared_id)


def _max_tokens(request: ChatRequest, room: int) -> int | None:
    if request.only_prompt:
        return 1
    if request.max_tokens is None or not request.cut_to_context:
        return request.max_tokens
    return max(1, min(request.max_tokens, room))


def _output_wishes(
    model: ServedModel, request: ChatRequest, encoded: EncodedPrompt, *, is_remembered: bool
) -> OutputWishes:
    answer_format = model.answer_format
    is_kept = is_remembered or not request.stream or bool(request.return_token_ids)
    choice = request.tool_choice
    wants_calls = bool(request.tools) and choice.mode is not ToolMode.NONE and answer_format.tools is not None
    if not wants_calls and answer_format.reasoning is None:
        return OutputWishes(is_silent=request.only_prompt, is_kept=is_kept)

    def parser() -> AnswerParser | None:
        return new_parser(
            answer_format,
            wants_calls=wants_calls,
            starts_in_reasoning=encoded.starts_in_reasoning,
            tools=request.tools,
        )

    return OutputWishes(
        new_parser=parser,
        shown=answer_format.marks(wants_calls=wants_calls),
        one_call=wants_calls and not choice.parallel,
        is_silent=request.only_prompt,
        is_kept=is_kept,
    )
