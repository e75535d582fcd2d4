"""GrammarChecks: what answers are to be held to, checked beside the event loop, and remembered.

Owns how many grammars are worked out at once, how many wait for that, and which are known. A check takes
milliseconds, for the worst that a client can ask a second or two; others wait for it only when many such come
at once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from router.answers.formats import AnswerFormat
from router.answers.grammar_check import checked_grammar
from router.answers.grammars import grammar_for
from router.answers.wishes import OutputFormat, ToolChoice, ToolMode
from router.api.chat_request import ChatRequest
from router.errors import RouterBusy
from router.prompt.engines import TooMuchWork
from router.prompt.text_model import TextModel

MAX_CHARACTERS = 64 * 1024
"""Of a grammar that is checked here. Longer ones come with large bodies, and are checked where those are."""

NUM_THREADS = 2
MAX_WAITING = 64
MAX_KNOWN = 128


class WishedGrammar(NamedTuple):
    """An answer's grammar as it was asked for, "" for none, and the fields that asked."""

    text: str
    parameter: str = ""
    tool_parameter: str = ""
    special_tokens: tuple[str, ...] = ()

    def checked(self) -> str:
        """Blocks while it is worked out. Raises InvalidRequest."""
        return checked_grammar(
            self.text,
            parameter=self.parameter,
            special_tokens=self.special_tokens,
            tool_parameter=self.tool_parameter,
        )


NO_GRAMMAR = WishedGrammar("")


def chat_grammar(model: TextModel, request: ChatRequest, *, starts_in_reasoning: bool) -> WishedGrammar:
    """Raises InvalidRequest for what contradicts itself."""
    is_free = request.output_format is None and request.tool_choice.mode is not ToolMode.REQUIRED
    if (is_free and not request.tools) or request.only_prompt:  # nearly all of them
        return NO_GRAMMAR
    special_tokens = _special_tokens(model)
    parameter = "tools" if request.output_format is None else request.output_format.parameter
    text = grammar_for(
        request.output_format,
        request.tools,
        request.tool_choice,
        model.answer_format,
        starts_in_reasoning=starts_in_reasoning,
        special_tokens=special_tokens,
        tool_parameter=request.tool_parameter,
    )
    return WishedGrammar(text, parameter, request.tool_parameter, special_tokens)


def text_grammar(wished: OutputFormat | None) -> WishedGrammar:
    """Of an answer that is text and nothing else. Raises InvalidRequest."""
    if wished is None:
        return NO_GRAMMAR
    text = grammar_for(wished, [], ToolChoice(), AnswerFormat())
    return WishedGrammar(text, wished.parameter)


class GrammarChecks:
    """To be closed with the router."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._known: OrderedDict[tuple[WishedGrammar, Hashable], str] = OrderedDict()
        self._num_waiting = 0

    async def checked(self, wished: WishedGrammar, owner: Hashable = None) -> str:
        """Each owner's are remembered apart: how soon it is checked would tell others that it was asked for
        before. Raises InvalidRequest for what cannot be followed, RouterBusy, and TooMuchWork for what is to
        be checked elsewhere."""
        if not wished.text:
            return ""
        key = (wished, owner)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        if len(wished.text) > MAX_CHARACTERS:
            raise TooMuchWork
        if self._num_waiting >= MAX_WAITING:
            raise RouterBusy("Too many schemas and grammars are being worked out. Please try again.")
        self._num_waiting += 1
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(self._threads, wished.checked)
        finally:
            self._num_waiting -= 1
        self._known[key] = grammar
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return grammar

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _special_tokens(model: TextModel) -> tuple[str, ...]:
    """The marks of an answer that are added to the vocabulary: special or not, no text matches them."""
    marks = model.answer_format.marks(wants_calls=True)
    return tuple(sorted(marks & model.tokenizer.added_tokens))
