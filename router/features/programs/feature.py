"""Programs: names the program of each request, and tells the book how its turns end.

Owns the names' counts and the book's housekeeping. A router without it has no book.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replicas.protocol.cluster_secret import ClusterSecret
from router.api.access import AdminGuard, admin_access
from router.api.api_request import ApiRequest
from router.api.choice_output import TOOL_CALLS
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.feature import Feature
from router.features.programs.exchange import ProgramExchange
from router.features.programs.programs_view import STATES, programs_data
from router.features.programs.readers import Readers, conversation_name
from router.generation import Generation
from router.programs.book import ProgramBook
from router.programs.pauses import Pause
from router.served import ServedRequest
from router.shared.instruments import Instrument, counter, gauge

FORGET_SECONDS = 30.0
"""Interval at which the book is looked through for programs that do not return."""


class Programs(Feature):
    """`clock` is that of the book's turns. Without `secret` other routers are told nothing."""

    store: ProgramExchange | None

    def __init__(
        self,
        context: ApiContext,
        book: ProgramBook,
        clock: Callable[[], float],
        secret: ClusterSecret | None,
    ) -> None:
        self._book = book
        self._clock = clock
        redis_url = context.config.redis_url
        self.store = None if secret is None else ProgramExchange(redis_url, book, clock, secret)
        self._readers = Readers(context.config.program_headers)
        self._num_named: Counter[str] = Counter()
        self._num_unnamed = 0
        self._access = admin_access(context.config)

    def operator_routes(self) -> Sequence[Route]:
        guard = [Middleware(AdminGuard, access=self._access)]
        return [Route("/live/programs", self.programs, methods=["GET"], middleware=guard)]

    async def programs(self, request: Request) -> Response:
        content = encode_json(programs_data(self._book, self._clock()))
        return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        if len(request.prompts) != 1:
            return
        prompt = request.prompts[0]
        name = self._readers.named(
            request.scope["headers"],
            offers_tools=request.offers_tools,
            end_user=request.end_user,
            prompt_cache_key=prompt.generation.prompt_cache_key,
        )
        if name is None and request.offers_tools and request.history is not None:
            name = conversation_name(request.history)
        if name is None:
            self._num_unnamed += 1
            return
        if prompt.generation.salt_tag:
            name = structs.replace(name, salt=prompt.generation.salt_tag.hex())
        self._num_named[name.source] += 1
        prompt.generation = prompt.generation.of_program(name)

    def ended(self, request: ApiRequest, served: ServedRequest) -> None:
        for prompt, own in zip(request.prompts, served.prompts, strict=True):
            generation: Generation = prompt.generation
            if generation.program is None:
                continue
            program = self._book.known(generation.model, generation.caller.tenant.name, generation.program)
            if program is None:
                continue
            used, usage = program.used, own.usage
            if usage is not None:
                used.num_prompt_tokens += usage.num_prompt_tokens
                known, more = used.num_cached_tokens, usage.num_cached_tokens
                used.num_cached_tokens = None if known is None or more is None else known + more
            used.num_output_tokens += own.num_output_tokens
            if not generation.program.is_side and served.error is None:
                calls = prompt.outputs and prompt.outputs[0].finish_reason == TOOL_CALLS
                self._book.paused(program, Pause.TOOL if calls else Pause.USER)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            self._book.forget_old(self._clock())

    def instruments(self) -> Iterator[Instrument]:
        book = self._book
        yield gauge(
            "router_programs",
            "Programs that this router knows, by whether a turn of theirs runs (active), none does (paused), "
            "or one waits until the program may run (waiting)",
            lambda: dict.fromkeys(STATES, 0) | Counter(each.state for each in book.programs()),
            "state",
        )
        yield gauge(
            "router_programs_admitted_tokens",
            "Tokens of the contexts of programs that may run",
            book.num_admitted_tokens,
            "model",
        )
        yield counter("router_programs_begun_total", "Programs that have begun", lambda: book.num_begun)
        yield counter(
            "router_programs_forgotten_total",
            "Programs that have not returned, or were too many",
            lambda: book.num_forgotten,
        )
        yield counter(
            "router_program_moves_total",
            "Turns that went to another replica than their program's last one",
            lambda: book.num_moved,
        )
        yield counter(
            "router_program_turns_total", "Turns of programs that have ended", lambda: book.num_turns_ended
        )
        yield counter(
            "router_program_attained_seconds_total",
            "Time that turns of programs were at replicas",
            lambda: book.attained_seconds,
        )
        yield counter(
            "router_program_waits_total",
            "Turns that have waited until their program might run",
            lambda: book.num_waited,
        )
        yield counter(
            "router_program_wait_seconds_total",
            "Time that those turns have waited",
            lambda: book.waited_seconds,
        )
        yield counter(
            "router_programs_named_total",
            "Requests that were named as turns or side calls of a program, by what named them",
            lambda: self._num_named,
            "source",
        )
        yield counter(
            "router_programs_unnamed_total",
            "Requests that no header and no field names a program of",
            lambda: self._num_unnamed,
        )
        yield counter(
            "router_programs_unreadable_total",
            "Headers that should name a program and are empty, too long or not printable",
            lambda: self._readers.num_unreadable,
        )
