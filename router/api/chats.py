"""Chats: the one way of every dialect from a body to a conversation that can run.

Owns what is done beside the event loop and what in a process of its own. Knows no dialect: how a body is read
and an answer is written is given.
"""

from functools import cache

from replicas.protocol.frames import BodyForm
from router.answers.parser import AnswerParser, new_parser
from router.answers.wishes import ToolMode
from router.api.api_request import ApiRequest, OutputWishes, Prepare, make_prompt
from router.api.chat_request import ChatRequest
from router.api.context import ApiContext
from router.api.dialects import DIALECTS, NewWriter
from router.api.prepare import PreparedChat, prepared_chat
from router.api.prepare_in_worker import received_chat
from router.api.prepare_on_loop import OnLoop
from router.api.relayed import relay
from router.api.sampling import TokenRules, sampling_params
from router.encoded import EncodedPrompt
from router.errors import about_model
from router.large_bodies.body_weight import is_light_chat
from router.large_bodies.jobs import PreparedRequest
from router.prompt.catalog import ServedModel
from router.prompt.engines import TooMuchWork


@cache
def prepare_chats(kind: str) -> Prepare:
    """Return the way of bodies of a kind in DIALECTS."""
    new_writer = DIALECTS[kind].new_writer

    async def prepare(context: ApiContext, asked: ApiRequest) -> None:
        """Raises InvalidRequest, UnknownModel or RouterBusy."""
        prepared = await _prepared(context, kind, asked)
        request = prepared.request
        context.unknown_fields.count(kind, request.unknown_fields)
        with about_model(request.model):
            model = context.catalog.get(request.model).bounded(asked.caller.max_context)
            if model.card.takes_bodies:
                _fill(context, asked, model, prepared, new_writer)
                relay(context, asked, model, BodyForm(kind), request, prepared.sent)
                return
            for hook in context.hooks.encoded:
                prepared = await hook(asked, model, prepared)
            _fill(context, asked, model, prepared, new_writer)

    return prepare


async def _prepared(context: ApiContext, kind: str, asked: ApiRequest) -> PreparedChat:
    if is_light_chat(asked.body):
        try:
            return await prepared_chat(OnLoop(context, asked), kind, asked.body)
        except TooMuchWork:
            pass
    sent = await context.worker.prepare(kind, asked.body, asked.address, asked.caller.max_context)
    assert isinstance(sent, PreparedRequest)
    return received_chat(sent)


def _fill(
    context: ApiContext,
    asked: ApiRequest,
    model: ServedModel,
    prepared: PreparedChat,
    new_writer: NewWriter,
) -> None:
    request, encoded, token_ids = prepared.request, prepared.prompt, prepared.token_ids
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
        asked.caller,
        model,
        request,
        token_ids,
        sampling,
        _output_wishes(model, request, encoded, is_remembered=prepared.is_remembered),
        packed_tokens=encoded.token_ids,
        keeps=encoded.keeps,
        num_stable_tokens=encoded.num_stable_tokens,
        num_head_tokens=encoded.num_head_tokens,
        images=encoded.images,
        grammar_seconds=encoded.grammar.seconds,
    )
    prompt.outline = encoded.outline
    asked.writer, asked.compared_id = new_writer(context, request, model, prompt), request.compared_id
    asked.failed = getattr(asked.writer, "failed", None)
    asked.model, asked.asked_model = model, request.model
    asked.prompts, asked.stream = [prompt], bool(request.stream)
    asked.end_user, asked.offers_tools = request.end_user, bool(request.tools)
    asked.history = encoded.history


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
