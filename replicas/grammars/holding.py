"""GrammarHolder: holds an engine's requests to their grammars, worked out in threads of its own.

Owns the threads, the grammars that were worked out lately, the number of choices that are held to one, and
how long a choice waits for its grammar. What it costs to work one out is bounded by llguidance's limits.

    begin ──▶ a thread: the vocabulary, once ─▶ the grammar, once for its namespace ─▶ a copy for each choice
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from replicas.engine import EngineRequest, RequestRefused
from replicas.grammars.constraint import ConstraintFailed
from replicas.grammars.matcher import Masks, Matcher, compile_grammar, fill_masks
from replicas.grammars.vocabulary import NoVocabulary
from replicas.protocol.frames import RefusalCode

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_HELD = 1024
"""Choices that are held to a grammar at once: 10 GiB at the very worst, and 100 MiB with usual grammars."""
MAX_KEPT = 32
"""Grammars that are kept for the next request with the same one."""


class _Shared:
    """One grammar of one namespace: worked out by the first thread that needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._matcher: LLMatcher | None = None
        self._failure: ConstraintFailed | None = None

    def copy(self, vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
        """Raises ConstraintFailed."""
        with self._lock:
            if self._failure is not None:
                raise ConstraintFailed(self._failure.message, self._failure.code)
            if self._matcher is None:
                try:
                    self._matcher = compile_grammar(vocabulary, grammar)
                except ConstraintFailed as failure:
                    self._failure = failure
                    raise
            return self._matcher.deep_copy()


class HeldChoice:
    """The constraint of one choice, whose matcher a thread makes."""

    def __init__(self, holder: "GrammarHolder", matcher: Future[Matcher], waits_until: float) -> None:
        self._holder = holder
        self._future = matcher
        self._waits_until = waits_until
        self._has_ended = False

    @property
    def matcher(self) -> Matcher:
        """Only of one that is ready."""
        return self._future.result(timeout=0)

    def is_ready(self) -> bool:
        if self._future.done():
            self._check()
            return True
        if self._holder.clock() < self._waits_until:
            return False
        if self._future.cancel():
            raise ConstraintFailed("too many grammars wait to be worked out", RefusalCode.OVERLOADED)
        raise ConstraintFailed(f"the grammar takes more than {self._holder.seconds:g} s to work out")

    def _check(self) -> None:
        try:
            self._future.result(timeout=0)
        except CancelledError:
            raise ConstraintFailed("the engine ends", RefusalCode.DRAINING) from None
        except ConstraintFailed:
            raise
        except Exception as error:  # of this choice alone, whatever llguidance or a tokenizer has raised
            logger.exception("a grammar cannot be worked out")
            raise ConstraintFailed("the grammar cannot be worked out", RefusalCode.INTERNAL) from error

    def allowed(self) -> list[int]:
        mask = self._holder.masks([self])
        return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]

    def consume(self, token_id: int) -> bool:
        return self.matcher.consume(token_id)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._future.cancel()
            self._holder.num_held -= 1


class GrammarHolder:
    """`read_vocabulary` may raise NoVocabulary: then whatever asks for a grammar fails. A choice waits for
    its grammar at most `seconds` of the `clock`. One thread calls all this, and all that `begin` returns.
    """

    def __init__(
        self,
        read_vocabulary: Callable[[], LLTokenizer],
        eos_token_ids: Sequence[int],
        *,
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.seconds = seconds
        self.clock = clock
        self.num_held = 0
        self._read_vocabulary = read_vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, str], _Shared] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._executor: LLExecutor | None = None
        self._has_news = threading.Event()

    def begin(self, request: EngineRequest) -> HeldChoice:
        """Raises RequestRefused."""
        if self.num_held >= MAX_HELD:
            raise RequestRefused(
                RefusalCode.OVERLOADED, f"{self.num_held} sequences are held to a grammar already"
            )
        self.num_held += 1
        # Tenants do not share what was worked out: how soon it is there would tell what others ask for.
        key = (request.submit.root, request.sampling.grammar)
        shared = self._kept.setdefault(key, _Shared())
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        future = self._threads.submit(self._work_out, request, shared)
        future.add_done_callback(lambda done: self._has_news.set())
        return HeldChoice(self, future, self.clock() + self.seconds)

    def wait(self, seconds: float) -> None:
        if self._has_news.wait(seconds):
            self._has_news.clear()

    def masks(self, choices: Sequence[HeldChoice]) -> Masks:
        """What each of them may say next, a row for each."""
        vocabulary = self._vocabulary
        assert vocabulary is not None, "a choice is ready and no vocabulary"
        if self._executor is None:
            self._executor = LLExecutor()
        masks = np.zeros((len(choices), -(-vocabulary.vocab_size // 32)), dtype=np.int32)
        fill_masks([choice.matcher for choice in choices], self._executor, masks)
        return masks

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work_out(self, request: EngineRequest, shared: _Shared) -> Matcher:
        sampling, num_output_tokens = request.sampling, request.submit.num_output_tokens
        inner = shared.copy(self._tokens(), sampling.grammar)
        output = request.token_ids[len(request.token_ids) - num_output_tokens :]
        return Matcher(inner, sampling, self._eos_token_ids, output)

    def _tokens(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._read_vocabulary()
                except NoVocabulary as error:
                    raise ConstraintFailed(f"this model cannot be held to a grammar: {error}") from error
            return self._vocabulary
