"""PickedExchange: one request that generates, from its decision to the end of a server's answer.

Owns what the router's own pipeline does not know: the deadline of a decision, the body that goes to the
server, and what the server's answer says of itself. All before the decision is `router/api/serving.py`'s.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from replicas.protocol.frames import PromptUsage
from replicas.protocol.passed_routes import with_model
from replicas.protocol.status import ModelCard
from router.api.api_request import ApiRequest, Prepare, Prompt
from router.api.context import ApiContext
from router.api.json_body import encode_json, unsupported
from router.api.passed import passed_endpoints, prepare_passed
from router.api.serving import Exchange, GenerationEndpoint
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.pick import Pick
from router.edge.http import header
from router.errors import ErrorKind, InvalidRequest, TooLate
from router.picker.answer_reader import AnswerReader
from router.picker.messages import Head
from router.picker.sent_body import SentBody
from router.picker.stream import STREAM, GatewayStream

DECISION_SECONDS = 5.0
"""Longest time from the end of a body to its decision, beyond the wait for a replica that is coming. No
timeout of the gateway counts then."""

RANK_HEADER = b"x-data-parallel-rank"

NO_RESPONSES = "No responses are stored behind a gateway: send the whole conversation as 'input'."

_KINDS = {400: ErrorKind.INVALID, 404: ErrorKind.UNKNOWN_MODEL, 429: ErrorKind.OVERLOADED}
"""Meaning of a server's status; any other is a failure."""


def picked_endpoints(
    context: ApiContext, prepares: Mapping[str, Prepare]
) -> Callable[[str], GenerationEndpoint | None]:
    """Find the endpoint of a path that a server answers, for requests at a gateway."""
    # Nothing changes a prompt's tokens: the server renders it by itself.
    picked = context.without_hooks("encoded", "beginning")
    endpoints = {
        path: GenerationEndpoint(
            picked,
            path.removeprefix("/v1/").replace("/", "_"),
            _in_time(prepare),
            _exchange(SentBody(path, context.config.pass_fields)),
        )
        for path, prepare in prepares.items()
    }
    passed = passed_endpoints(picked, _in_time(prepare_passed), PickedExchange)
    return lambda path: endpoints.get(path) or passed(path)


def _exchange(sent: SentBody) -> "type[PickedExchange]":
    class Exchange(PickedExchange):
        _sent = sent

    return Exchange


def _in_time(prepare: Prepare) -> Prepare:
    """Prepare a request before its decision is due."""

    async def prepared(context: ApiContext, request: ApiRequest) -> None:
        try:
            async with _deadline(context, request):
                await prepare(context, request)
        except InvalidRequest as error:
            if error.parameter == "previous_response_id":
                raise unsupported(error.parameter, NO_RESPONSES) from error
            raise

    return prepared


class PickedExchange(Exchange):
    _sent: SentBody | None = None
    _body = b""
    _pick: Pick | None = None
    _reader: AnswerReader | None = None

    def has_prepared(self, body: bytes) -> None:
        super().has_prepared(body)
        self._body = body

    async def run(self) -> None:
        """Several prompts of one request go to one server, which is chosen by the first."""
        request, context, stream = self._request, self._context, _stream_of(self._request)
        dispatcher, prompt = context.dispatcher, request.prompts[0]
        assert isinstance(dispatcher, Dispatcher)
        submit = prompt.generation.submit
        trace = self.trace.generation()
        with (
            context.bodies.hold(request.address) as held,
            Pick(dispatcher, prompt.generation, trace, _admits(stream.subset, submit.route)) as pick,
        ):
            held.take(len(self._body))
            async with _deadline(context, request):
                card = await pick.place()
            self._pick = pick
            prompt.decided(pick)
            body, self._body = self._sent_body(), b""
            await stream.forward(card.endpoint, _headers_for(request, card), body, self)
            held.give_back()
            try:
                await stream.answered()
            finally:
                if self._reader is not None:
                    self._read_facts(self._reader, prompt, pick)

    def _sent_body(self) -> bytes:
        """The model goes by its first name: not each of its servers may know it by another."""
        request, prompts = self._request, self._request.prompts
        submit = prompts[0].generation.submit
        if self._sent is None:
            return with_model(submit.content_type, self._body, request.model.name)
        fields = {
            "cache_salt": b'"%b"' % submit.root.hex().encode(),
            "model": encode_json(request.model.name),
            "priority": b"%d" % submit.priority if submit.priority else None,
        }
        most = min(prompt.generation.sampling.max_tokens for prompt in prompts)
        is_limited = request.caller.max_context is not None
        num_kept = max(len(prompt.generation.token_ids) for prompt in prompts)
        return self._sent.write(self._body, fields, most if is_limited else None, num_kept)

    async def finish(self) -> None:
        """The server has answered."""

    def answer_begins(self, head: Head) -> None:
        request = self._request
        status = head.value(b":status") or b""
        request.status = int(status) if status.isdigit() else 200
        if request.status != 200:
            request.end_with("ServerRefused", _KINDS.get(request.status, ErrorKind.FAILED))
            assert self._pick is not None
            self._pick.failed(f"the server answers {request.status}")
        elif head.value(b"content-encoding") in (None, b"identity"):
            kind = head.value(b"content-type") or b""
            self._reader = AnswerReader(is_stream=kind.startswith(b"text/event-stream"))

    def answer_part(self, piece: bytes) -> None:
        request = self._request
        if request.first_token_seconds is None and request.status == 200:
            request.first_token_seconds = self.seconds()
            assert self._pick is not None
            self._pick.first_token()
        if self._reader is not None:
            self._reader.feed(piece)

    def _read_facts(self, reader: AnswerReader, prompt: Prompt, pick: Pick) -> None:
        """Take what the answer says. The cached tokens of several prompts cannot be told apart."""
        request, facts = self._request, reader.facts()
        prompt.outputs[0].num_tokens = facts.num_output_tokens
        if facts.answer_id is not None:
            request.writer.answer_id = facts.answer_id
        is_alone = len(request.prompts) == 1
        if prompt.generation.submit.route:
            prompt.usage = PromptUsage(facts.num_prompt_tokens or 0, None, 0)
            pick.used(None, facts.num_output_tokens)
            return
        num_prompt, num_cached = len(prompt.generation.token_ids), facts.num_cached_tokens
        if is_alone and facts.num_prompt_tokens not in (None, num_prompt):
            _stream_of(request).tally.num_other_renderings += 1
        pick.used(num_cached if is_alone else None, facts.num_output_tokens)
        if num_cached is None or not is_alone:
            return
        size, num_cached = request.model.card.block_size, min(num_cached, num_prompt)
        prompt.usage = PromptUsage(num_prompt, num_cached, max(0, num_prompt // size * size - num_cached))
        for hook in self._context.hooks.started:
            hook(request, prompt)


@contextlib.asynccontextmanager
async def _deadline(context: ApiContext, request: ApiRequest) -> AsyncIterator[None]:
    """Raises TooLate when the decision is due."""
    ended_at = _stream_of(request).body_ended_at
    assert ended_at is not None
    try:
        async with asyncio.timeout_at(ended_at + DECISION_SECONDS + context.config.wait_seconds):
            yield
    except TimeoutError as error:
        raise TooLate("No server was chosen in time. Try again later.") from error


def _stream_of(request: ApiRequest) -> GatewayStream:
    stream = request.scope["extensions"][STREAM]
    assert isinstance(stream, GatewayStream)
    return stream


def _admits(subset: frozenset[str] | None, route: str) -> Callable[[ModelCard], bool]:
    """A server that takes bodies is picked for the routes alone that are passed on to it."""

    def admits(card: ModelCard) -> bool:
        may_go = route in card.routes if route else not card.takes_bodies
        return may_go and bool(card.endpoint) and (subset is None or card.endpoint in subset)

    return admits


def _headers_for(request: ApiRequest, card: ModelCard) -> list[tuple[bytes, bytes | None]]:
    """Headers that are not as the client sent them; None: without it."""
    headers: list[tuple[bytes, bytes | None]] = []
    if card.endpoint_rank is not None:
        headers.append((RANK_HEADER, b"%d" % card.endpoint_rank))
    elif header(request.scope, RANK_HEADER) is not None:  # a rank is chosen here, or by the server
        headers.append((RANK_HEADER, None))
    if header(request.scope, b"content-encoding") is not None:  # the body is sent as it was before
        headers.append((b"content-encoding", b"identity"))
    return headers
