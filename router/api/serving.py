"""GenerationEndpoint: the raw ASGI application behind the routes that generate.

Owns a request's way through the router, the same for every dialect: read, prepare, run, write, and count.
Knows no field of a body and nothing of routing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from replicas.protocol.frames import PromptUsage, TokenDelta, TokenLogprobs
from router.answers.parts import Part, Text
from router.api.api_request import AnswerWriter, ApiRequest, Prepare, Prompt
from router.api.caching import lease_headers
from router.api.context import ApiContext, Runs
from router.api.dialects import vendor_of
from router.api.error_shapes import OPENAI_ERRORS
from router.api.sse import EVENT_STREAM_HEADERS
from router.api.timeouts import set_timeout, timeout_of
from router.edge.http import (
    ClientConnection,
    ClientGone,
    Header,
    WhileConnected,
    client_request_id,
    client_trace_parent,
    connection_of,
    send_first,
    send_whole,
)
from router.edge.http_error import INTERNAL_ERROR, HttpError, http_error, method_not_allowed
from router.errors import ErrorKind, NoReplicaAvailable, RouterError, UnknownModel
from router.limits.first_replica import FirstReplica
from router.observation.trace_points import Trace
from router.served import CLIENT_GONE, TokenGaps

logger = logging.getLogger(__name__)

MAX_WAITING_DELTAS = 8192
"""Unread deltas of one prompt; beyond that the client is disconnected."""

LOOK_SECONDS = 0.5

BYTES_PER_TOKEN_OF_TEXT = 4
"""A guess, for bodies that cannot be rendered yet."""

NO_TEXT = Text("")


class GenerationEndpoint:
    """`exchange` runs and answers its requests."""

    def __init__(
        self, context: ApiContext, route: str, prepare: Prepare, exchange: "type[Exchange] | None" = None
    ) -> None:
        self._context = context
        self._route = route
        self._prepare = prepare
        self._exchange = exchange or Exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        request = ApiRequest(scope)
        request.request_id = client_request_id(scope) or context.new_id("req_")
        request.route, request.arrived_at = self._route, context.wall_clock()
        parent = client_trace_parent(scope)
        trace = context.tracing.request(scope["method"], request.path, request.request_id, parent)
        request.trace_id = trace.trace_id
        exchange = self._exchange(context, request, send, trace)
        try:
            if scope["method"] != "POST":
                request.end_with("MethodNotAllowed", ErrorKind.METHOD)
                error = method_not_allowed(scope["method"], request.path)
                await exchange.fail(error, extra=[(b"allow", b"POST")])
            else:
                await self._serve(exchange, request, receive)
        finally:
            served = request.served(exchange.seconds())
            trace.served(served)
            context.has_ended(request, served)

    async def _serve(self, exchange: "Exchange", request: ApiRequest, receive: Receive) -> None:
        context, caller = self._context, request.caller
        try:
            timeout_seconds = timeout_of(request.scope)
            for hook in context.hooks.arrived:
                hook(request)
            with context.bodies.hold(request.address) as held:
                body = request.body = await context.read_body(request.scope, receive, held)
                request.read_seconds = exchange.seconds()
                with context.in_flight.hold(request.address):
                    async with exchange.while_connected(receive):
                        await context.tenant_turns.turn(caller.tenant, len(body))
                        try:
                            await self._prepare(context, request)
                        except (NoReplicaAvailable, UnknownModel) as error:
                            await _wait_for_model(context, request, error, timeout_seconds)
                            request.read_seconds = exchange.seconds()
                            await self._prepare(context, request)
                        set_timeout(request.prompts, timeout_seconds)
                        exchange.has_prepared(body)
                        request.body = body = b""
                        held.give_back()
                        if context.first_replica is not None:
                            await _wait_for_replica(context.first_replica, request, exchange.seconds)
                        with context.admit(request):
                            await exchange.run()
            await exchange.finish()
        except ClientGone as error:
            request.status = CLIENT_GONE
            request.end_with(type(error).__name__, ErrorKind.CLIENT_GONE)
        except RouterError as error:
            request.end_with(type(error).__name__, error.kind)
            model = error.model
            if request.model_name is None and model is not None and context.catalog.is_served(model):
                request.model_name = context.catalog.get(model).name
            await exchange.fail(http_error(error))
        except Exception:  # the outermost frame of a request: whatever it is, the client gets an answer
            request.end_with("InternalError", ErrorKind.INTERNAL)
            logger.exception(
                "a request failed request_id=%s trace_id=%s", request.request_id, request.trace_id
            )
            await exchange.fail(INTERNAL_ERROR)
        except BaseException as error:  # the server cancels what outlives its last moments
            request.status = 503
            request.end_with(type(error).__name__, ErrorKind.CUT_OFF)
            raise


async def _wait_for_model(
    context: ApiContext,
    request: ApiRequest,
    error: NoReplicaAvailable | UnknownModel,
    timeout_seconds: float | None,
) -> None:
    """Wait for a model that this router has not met, because its last replica went before. Raises `error` for
    a model that was never registered, and where requests do not wait."""
    first, model = context.first_replica, error.model
    if first is None or model is None or model not in first.registered():
        raise error
    tenant = request.caller.tenant
    limits = [each for each in (timeout_seconds, tenant.slo_seconds) if each is not None]
    num_tokens = len(request.body) // BYTES_PER_TOKEN_OF_TEXT
    await first.wait(model, tenant, num_tokens, min(limits, default=None))


async def _wait_for_replica(first: FirstReplica, request: ApiRequest, seconds: Callable[[], float]) -> None:
    """Wait where the model of a prepared request has no replica. What this takes counts for its deadline."""
    model = request.model.card.name
    if first.has_ready(model):
        return
    generations, tenant = request.generations, request.caller.tenant
    limits = [each for each in (generations[0].timeout_seconds, tenant.slo_seconds) if each is not None]
    longest = min(limits, default=None)
    began = seconds()
    await first.wait(model, tenant, sum(len(each.token_ids) for each in generations), longest)
    if longest is not None:
        set_timeout(request.prompts, max(0.0, longest - (seconds() - began)))


class Exchange:
    """One request's answer on its way out."""

    def __init__(self, context: ApiContext, request: ApiRequest, send: Send, trace: Trace) -> None:
        self.trace = trace
        self._errors = vendor_of(request.scope).errors
        self._context = context
        self._request = request
        self._send = send
        self._connection = connection_of(request.scope)
        self._run: Runs | None = None
        self._is_held_long = False
        """It is a turn of a program, which may wait for minutes until a replica has it."""
        self._num_sent = 0
        self._num_sent_before = 0
        self._arrived = context.clock()
        self._is_streaming = False
        self._run_headers: list[Header] = []

    def while_connected(self, receive: Receive) -> WhileConnected:
        seconds = self._context.config.stream_comment_seconds / 2
        return WhileConnected(receive, self._connection, beat=self._beat, beat_seconds=seconds)

    def seconds(self) -> float:
        """Return the time since it arrived."""
        return self._context.clock() - self._arrived

    def has_prepared(self, body: bytes) -> None:
        context, request = self._context, self._request
        request.model_name = request.model.name
        for hook in context.hooks.prepared:
            hook(request, body)
        request.prepared_seconds = self.seconds()

    async def run(self) -> None:
        request = self._request
        if len(request.prompts) == 1:
            await self._run_prompt(request.prompts[0])
            return
        turns = self._context.turns
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt in request.prompts:
                    async with turns.piece():
                        tasks.create_task(self._run_prompt(prompt))
        except BaseExceptionGroup as group:
            expected, unexpected = group.split(RouterError)
            if expected is None or unexpected is not None:
                raise
            raise _first(expected) from group

    async def _run_prompt(self, prompt: Prompt) -> None:
        request, program = self._request, prompt.generation.program
        self._is_held_long = program is not None and not program.is_side
        async with self._context.dispatcher.run(prompt.generation, self.trace.generation()) as run:
            self._run = self._run or run
            self._listen(prompt, run)
            try:
                async for batch in run:
                    if request.first_token_seconds is None:
                        self._start(prompt, run, batch)
                    elif request.gaps is not None and batch and batch[-1].num_tokens:
                        request.gaps.arrived(self._context.clock())
                    events = self._take(prompt, run, batch)
                    if events:
                        if self._connection is not None and self._connection.is_backed_up:
                            await _wait_for_reader(self._connection, run)
                        await self._stream(events)
            finally:
                if prompt.usage is None:  # no replica has answered, and there may have been several attempts
                    prompt.decided(run)

    def _listen(self, prompt: Prompt, run: Runs) -> None:
        """Have tokens in the middle of a choice taken as they arrive. Stop strings, which may end it there,
        and connections that are not ours are for the task."""
        request, connection, writer = self._request, self._connection, self._request.writer
        if prompt.outputs[0].may_stop_early or (request.stream and connection is None):
            return
        stream = connection if request.stream else None

        def take(delta: TokenDelta) -> bool:
            output = prompt.outputs[delta.key.choice]
            if not output.num_tokens or output.finish_reason is not None:
                return False
            if stream is not None and not stream.takes_parts:
                return False
            if request.gaps is not None and (delta.token_ids or delta.num_counted):
                request.gaps.arrived(self._context.clock())
            if stream is None:
                output.hold(delta)
                if delta.logprobs:
                    output.logprobs.extend(delta.logprobs)
                return True
            parts = output.add(delta)
            if len(parts) == 1 and not delta.logprobs:  # nearly all of them
                event = writer.part(prompt, delta.key.choice, parts[0], ())
            else:
                event = _events_of(writer, prompt, delta, parts)
            if event:
                self._num_sent += 1
                stream.write_part(event)
            return True

        run.listen(take)

    def _start(self, prompt: Prompt, run: Runs, batch: Sequence[TokenDelta]) -> None:
        request, now = self._request, self._context.clock()
        request.first_token_seconds = now - self._arrived
        if len(request.prompts) == len(request.prompts[0].outputs) == 1:
            request.gaps = TokenGaps(now, sum(delta.num_tokens for delta in batch))
        self._name_run(run)
        usage = next((delta.usage for delta in batch if delta.usage is not None), None)
        if usage is not None:
            self._run_headers += lease_headers(prompt.wished_leases, usage)

    def _name_run(self, run: Runs) -> None:
        self._run_headers = [
            (b"x-kvasir-replica", run.replica_id.encode()),
            (b"x-kvasir-overlap-tokens", b"%d" % run.decision.num_found_tokens),
            (b"x-kvasir-reason", str(run.decision.reason).encode()),
        ]
        if run.decision.split is not None:
            self._run_headers.append((b"x-kvasir-computed-at", run.decision.computed_at.encode()))
        if (unit := self._request.model.card.unit) != "tokens":
            self._run_headers.append((b"x-kvasir-unit", unit.encode()))

    def _take(self, prompt: Prompt, run: Runs, batch: Sequence[TokenDelta]) -> bytes:
        """Feed a batch to its choices. Returns what to stream."""
        events: list[bytes] = []
        request, writer = self._request, self._request.writer
        for delta in batch:
            choice = delta.key.choice
            output = prompt.outputs[choice]
            if output.has_finished():
                continue
            is_first = not output.num_tokens
            if delta.usage is not None and (choice == 0 or prompt.usage is None):
                self._read(prompt, run, delta.usage)
            parts = output.add(delta)
            if output.was_stopped:
                run.abort_choice(choice)
            if prompt.usage is None and output.has_finished():  # an engine that was to tell at the end
                self._read(prompt, run, prompt.usage_or_bare())
            if not request.stream:
                if delta.logprobs:
                    output.logprobs.extend(output.said_logprobs(delta))
                continue
            if is_first:
                events.append(writer.open(prompt, choice))
            events.append(_events_of(writer, prompt, delta, parts))
            if output.has_finished():
                events.append(writer.close(prompt, choice))
        return b"".join(events)

    def _read(self, prompt: Prompt, run: Runs, usage: PromptUsage) -> None:
        """A replica has said what of the prompt it read from cache."""
        prompt.usage = usage
        prompt.decided(run)
        for hook in self._context.hooks.started:
            hook(self._request, prompt)

    async def _stream(self, events: bytes, *, is_last: bool = False) -> None:
        self._num_sent += 1
        if not self._is_streaming:
            self._is_streaming = True
            headers = [*self._stream_headers(), *self._own_headers()]
            await send_first(self._send, self._connection, headers, events)
            if not is_last:
                return
            events = b""
        await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})

    def _stream_headers(self) -> Sequence[Header]:
        return EVENT_STREAM_HEADERS

    async def _beat(self) -> None:
        """Proxies cut what is silent: a stream of which nothing was sent since the last time is kept alive.

        Other requests than turns of programs get none before a replica has them: they can be refused with a
        status of their own.
        """
        is_silent = self._num_sent == self._num_sent_before
        request, run = self._request, self._run
        is_backed_up = self._connection is not None and self._connection.is_backed_up
        may_send = run is not None or self._is_held_long
        if is_silent and not is_backed_up and request.stream and may_send:
            if not self._is_streaming and run is not None:
                self._name_run(run)
            await self._stream(request.writer.keep_alive)
        self._num_sent_before = self._num_sent

    async def finish(self) -> None:
        """The end of a stream, or the whole answer. It is remembered before its client can go on from it."""
        request = self._request
        for hook in self._context.hooks.answered:
            hook(request)
        usage = request.usage()
        if request.stream:
            await self._stream(request.writer.end(usage), is_last=True)
        else:
            headers = [(b"content-type", b"application/json"), *self._own_headers()]
            body = request.writer.whole(usage)
            await send_whole(self._send, 200, headers, body, self._connection)

    async def fail(self, error: HttpError, *, extra: Sequence[Header] = ()) -> None:
        request = self._request
        request.status = self._errors.status(error)
        if self._is_streaming:
            failed = request.failed
            event = failed(error) if failed else self._errors.event(error, request.request_id)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        headers = [*error.headers(), *extra, *self._id_headers()]
        for hook in self._context.hooks.headers:
            headers += hook(request)
        await send_whole(self._send, request.status, headers, self._errors.body(error, request.request_id))

    def _own_headers(self) -> list[Header]:
        headers = [*self._id_headers(), *self._run_headers]
        for hook in self._context.hooks.headers:
            headers += hook(self._request)
        if self._errors is OPENAI_ERRORS:
            milliseconds = self.seconds() * 1000
            headers.append((b"openai-processing-ms", b"%d" % milliseconds))
        return headers

    def _id_headers(self) -> list[Header]:
        value = self._request.request_id.encode()
        return [(name, value) for name in self._errors.request_id_headers]


def _events_of(writer: AnswerWriter, prompt: Prompt, delta: TokenDelta, parts: Sequence[Part]) -> bytes:
    """Write a delta's parts. Its log-probabilities go with the first text, or the first part."""
    choice = delta.key.choice
    logprobs: Sequence[TokenLogprobs] = ()
    if delta.logprobs:
        logprobs = prompt.outputs[choice].said_logprobs(delta)
    if len(parts) == 1:
        return writer.part(prompt, choice, parts[0], logprobs)
    if not parts:
        return writer.part(prompt, choice, NO_TEXT, logprobs) if logprobs else b""
    theirs = next((place for place, part in enumerate(parts) if type(part) is Text), 0)
    return b"".join(
        [
            writer.part(prompt, choice, part, logprobs if place == theirs else ())
            for place, part in enumerate(parts)
        ]
    )


async def _wait_for_reader(connection: ClientConnection, run: Runs) -> None:
    """The generation goes on meanwhile, but not for ever: what waits takes memory."""
    while connection.is_backed_up:
        if run.num_waiting > MAX_WAITING_DELTAS:
            connection.give_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await connection.drained()


def _first(errors: BaseExceptionGroup[RouterError]) -> RouterError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RouterError)
    return error
