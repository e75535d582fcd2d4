"""GrammarHolder: holds an engine's requests to their grammars, compiled in threads of its own.

Owns the threads and their turns, the number of choices under a grammar, and how long each waits. Compiling is
bounded by llguidance's limits, and by the router's that compiled it before.

    begin ──▶ its tenant's turn ──▶ a thread: the vocabulary, once ─▶ the grammar, once for its namespace
                                                                       └─▶ a copy for each choice

Copies share the states of their grammar's automata, which answers create: memory and the number of states
belong to the grammar (`memory.py`).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from replicas.engine import EngineRequest, RequestRefused
from replicas.grammars.constraint import ConstraintExhausted, ConstraintFailed
from replicas.grammars.matcher import Masks, Matcher, compile_grammar, fill_masks
from replicas.grammars.memory import GrammarMemory, SharedGrammar
from replicas.grammars.vocabulary import NoVocabulary
from replicas.process.fair_line import FairLine
from replicas.protocol.frames import RefusalCode

logger = logging.getLogger(__name__)

NUM_THREADS = 3
"""Compiling threads; a tenant may use two."""
MAX_HELD = 1024
"""Choices that are held to a grammar at once; of a tenant, half as many."""


class HeldChoice:
    """The constraint of one choice, whose matcher a thread makes."""

    def __init__(self, holder: "GrammarHolder", request: EngineRequest, shared: SharedGrammar) -> None:
        self.request = request
        self.shared = shared
        self.future: Future[Matcher] = Future()
        self.cpu_seconds: Callable[[], float] = float
        """Returns the processor time that compiling its grammar has taken so far."""
        self._holder = holder
        self._waits_until = holder.clock() + holder.seconds
        self._has_ended = False

    @property
    def tenant(self) -> bytes:
        return self.request.submit.tenant

    @property
    def matcher(self) -> Matcher:
        """Only of one that is ready."""
        return self.future.result(timeout=0)

    def is_ready(self) -> bool:
        """Whether it is ready. The request is blamed only for its own compile time, not for waiting."""
        if self.future.done():
            self._check()
            return True
        if self._holder.clock() < self._waits_until:
            return False
        seconds = self._holder.seconds
        if not self._holder.withdraw(self) and self.cpu_seconds() >= seconds / 2:
            raise ConstraintFailed(f"the grammar takes more than {seconds:g} s to work out")
        raise ConstraintFailed("too many grammars wait to be worked out", RefusalCode.OVERLOADED)

    def _check(self) -> None:
        try:
            self.future.result(timeout=0)
        except (ConstraintFailed, ConstraintExhausted):
            raise
        except Exception as error:  # of this choice alone, whatever llguidance or a tokenizer has raised
            logger.exception("a grammar cannot be worked out")
            raise ConstraintFailed("the grammar cannot be worked out", RefusalCode.INTERNAL) from error

    def allowed(self) -> list[int]:
        mask = self._holder.masks([self])
        return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]

    def consume(self, token_id: int) -> bool:
        self.shared.num_tokens += 1
        try:
            return self.matcher.consume(token_id)
        except ConstraintExhausted:
            self._holder.memory.exhausted(self.shared)
            raise

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._holder.ends(self)


class GrammarHolder:
    """`read_vocabulary` may raise NoVocabulary: then all requests for grammars fail. A choice waits for its
    grammar at most `seconds` of the `clock`. One thread makes all calls, also on what `begin` returns."""

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
        self.memory = GrammarMemory()
        self.num_held = 0
        self._num_held_of: Counter[bytes] = Counter()
        self._read_vocabulary = read_vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._line: FairLine[HeldChoice] = FairLine(num_places=NUM_THREADS, most_waiting=MAX_HELD)
        self._line_lock = threading.Lock()
        self._is_closed = False
        self._executor: LLExecutor | None = None
        self._has_news = threading.Event()

    def begin(self, request: EngineRequest) -> HeldChoice:
        """Raises RequestRefused."""
        tenant, sampling = request.submit.tenant, request.sampling
        most_of_tenant = MAX_HELD // 2 if tenant else MAX_HELD
        if self.num_held >= MAX_HELD or self._num_held_of[tenant] >= most_of_tenant:
            raise RequestRefused(
                RefusalCode.OVERLOADED,
                f"{self.num_held} sequences are held to a grammar already, {self._num_held_of[tenant]} of"
                " this tenant's",
            )
        shared = self.memory.take((request.submit.root, sampling.grammar), tenant, sampling.grammar_bytes)
        if shared is None:
            raise RequestRefused(
                RefusalCode.OVERLOADED, "the grammars in use take as much memory as they may"
            )
        self.num_held += 1
        self._num_held_of[tenant] += 1
        choice = HeldChoice(self, request, shared)
        with self._line_lock:
            self._line.enter(tenant, choice)
        self._call_next()
        return choice

    def withdraw(self, choice: HeldChoice) -> bool:
        """Withdraw from waiting for a thread; False if it has one, or is done."""
        if not choice.future.cancel():
            return False
        with self._line_lock:
            self._line.leave(choice.tenant, choice)
        return True

    def ends(self, choice: HeldChoice) -> None:
        self.withdraw(choice)
        self.memory.give_back(choice.shared)
        self.num_held -= 1
        self._num_held_of[choice.tenant] -= 1
        if not self._num_held_of[choice.tenant]:
            del self._num_held_of[choice.tenant]

    def wait(self, seconds: float) -> None:
        if self._has_news.wait(seconds):
            self._has_news.clear()

    def masks(self, choices: Sequence[HeldChoice]) -> Masks:
        """Compute the next token masks, a row per choice."""
        vocabulary = self._vocabulary
        assert vocabulary is not None, "a choice is ready and no vocabulary"
        if self._executor is None:
            self._executor = LLExecutor()
        masks = np.zeros((len(choices), -(-vocabulary.vocab_size // 32)), dtype=np.int32)
        fill_masks([choice.matcher for choice in choices], self._executor, masks)
        return masks

    def close(self) -> None:
        with self._line_lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call_next(self) -> None:
        with self._line_lock:
            while not self._is_closed and (found := self._line.next()) is not None:
                self._threads.submit(self._run, found[1])

    def _run(self, choice: HeldChoice) -> None:
        """In a thread."""
        seconds = 0.0
        if choice.future.set_running_or_notify_cancel():
            try:
                vocabulary = self._tokens()
                began = time.thread_time()
                choice.cpu_seconds = _seconds_of_this_thread()
                matcher = self._work_out(choice, vocabulary)
                seconds = time.thread_time() - began
            except BaseException as error:
                choice.future.set_exception(error)
            else:
                choice.future.set_result(matcher)
            self._has_news.set()
        with self._line_lock:
            self._line.ends(choice.tenant, seconds)
        self._call_next()

    def _work_out(self, choice: HeldChoice, vocabulary: LLTokenizer) -> Matcher:
        request, shared = choice.request, choice.shared
        with shared.lock:
            if shared.failure is not None:
                raise ConstraintFailed(shared.failure.message, shared.failure.code)
            if shared.matcher is None or shared.is_exhausted:
                try:
                    shared.matcher = compile_grammar(vocabulary, request.sampling.grammar)
                except ConstraintFailed as failure:
                    shared.failure = failure
                    raise
            inner: LLMatcher = shared.matcher.deep_copy()
        output = request.token_ids[len(request.token_ids) - request.submit.num_output_tokens :]
        return Matcher(inner, request.sampling, self._eos_token_ids, output)

    def _tokens(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._read_vocabulary()
                except NoVocabulary as error:
                    raise ConstraintFailed(f"this model cannot be held to a grammar: {error}") from error
            return self._vocabulary


def _seconds_of_this_thread() -> Callable[[], float]:
    """How much processor time it will have taken from now on, for another thread to ask."""
    clock = time.pthread_getcpuclockid(threading.get_ident())
    began = time.clock_gettime(clock)
    return lambda: time.clock_gettime(clock) - began
