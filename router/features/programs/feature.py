"""Programs: names the program of each request, and tells the book how its turns end.

Owns the names' counts and the book's housekeeping. A router without it has no book.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from router.api.api_request import ApiRequest
from router.api.choice_output import TOOL_CALLS
from router.api.context import ApiContext
from router.feature import Feature
from router.features.programs.readers import Readers
from router.generation import Generation
from router.programs.book import ProgramBook
from router.programs.pauses import Pause
from router.served import ServedRequest
from router.shared.instruments import Instrument, counter

FORGET_SECONDS = 30.0
"""Interval at which the book is looked through for programs that do not return."""


class Programs(Feature):
    """`clock` is that of the book's turns."""

    def __init__(self, context: ApiContext, book: ProgramBook, clock: Callable[[], float]) -> None:
        self._book = book
        self._clock = clock
        self._readers = Readers(context.config.program_headers)
        self._num_named: Counter[str] = Counter()
        self._num_unnamed = 0

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        if len(request.prompts) != 1:
            return
        prompt = request.prompts[0]
        name = self._readers.named(
            request.scope["headers"],
            offers_tools=request.offers_tools,
            end_user=request.end_user,
            prompt_cache_key=prompt.generation.prompt_cache_key,
            conversation=request.conversation,
        )
        if name is None:
            self._num_unnamed += 1
            return
        self._num_named[name.source] += 1
        prompt.generation = prompt.generation.of_program(name)

    def ended(self, request: ApiRequest, served: ServedRequest) -> None:
        for prompt in request.prompts:
            generation: Generation = prompt.generation
            if generation.program is None or generation.program.is_side:
                continue
            program = self._book.known(generation.model, generation.caller.tenant.name, generation.program)
            if program is not None:
                calls = prompt.outputs and prompt.outputs[0].finish_reason == TOOL_CALLS
                self._book.paused(program, Pause.TOOL if calls else Pause.USER)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            self._book.forget_old(self._clock())

    def instruments(self) -> Iterator[Instrument]:
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
