"""GrammarHolder: choices wait for their grammars, for a bounded time and in bounded numbers."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from replicas.engine import RequestRefused
from replicas.grammars import holding, memory
from replicas.grammars.constraint import Constraint, ConstraintExhausted, ConstraintFailed
from replicas.grammars.holding import GrammarHolder
from replicas.grammars.matcher import compile_grammar
from replicas.grammars.vocabulary import NoVocabulary, read_vocabulary
from replicas.protocol.frames import RefusalCode
from replicas.protocol.status import TokenizerBundle
from replicas.toy_model import toy_model_path
from tests.replicas.builders import OTHER_ROOT, engine_request

EOS = (0, 2)
SECONDS = 5.0
A = 'start: "a"'
NEVER = 10_000
"""Waits of 10 ms."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def vocabulary() -> LLTokenizer:
    files = {"tokenizer.json": (toy_model_path() / "tokenizer.json").read_bytes()}
    return read_vocabulary(TokenizerBundle(files), 2048, EOS)


MakeHolder = Callable[..., GrammarHolder]


@pytest.fixture
def make() -> Iterator[MakeHolder]:
    made: list[GrammarHolder] = []

    def make(
        read: Callable[[], LLTokenizer] = vocabulary, clock: Clock | None = None, seconds: float = SECONDS
    ) -> GrammarHolder:
        made.append(GrammarHolder(read, EOS, seconds=seconds, clock=clock or Clock()))
        return made[-1]

    yield make
    for holder in made:
        holder.close()


def ready(holder: GrammarHolder, choice: Constraint) -> Constraint:
    for _ in range(NEVER):
        if choice.is_ready():
            return choice
        holder.wait(0.01)
    raise AssertionError("it does not become ready")


def test_what_may_come_is_what_the_grammar_has(make: MakeHolder) -> None:
    holder = make()
    choice = ready(holder, holder.begin(engine_request([5], grammar='start: "ab" | "ac"')))
    tokenizer = vocabulary()
    spelled = {bytes(tokenizer.decode_bytes([token])) for token in choice.allowed()}
    assert {b"a"} <= spelled <= {b"a", b"ab", b"ac"}
    (letter,) = tokenizer.tokenize_str("a")
    assert not choice.consume(letter)
    end = tokenizer.tokenize_str("b")[0]
    assert end in choice.allowed()
    assert choice.consume(end)
    assert set(choice.allowed()) == set(EOS)


def test_a_token_that_the_grammar_forbids_ends_the_choice(make: MakeHolder) -> None:
    holder = make()
    choice = ready(holder, holder.begin(engine_request([5], grammar=A)))
    with pytest.raises(ConstraintFailed, match="could not be followed"):
        choice.consume(vocabulary().tokenize_str("b")[0])


def test_a_grammar_is_worked_out_once_for_a_namespace_and_not_shared_with_another(
    make: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_grammar = holding.compile_grammar

    def counted(tokens: LLTokenizer, grammar: str) -> object:
        compiled.append(grammar)
        return compile_grammar(tokens, grammar)

    monkeypatch.setattr(holding, "compile_grammar", counted)
    holder = make()
    for _ in range(3):
        ready(holder, holder.begin(engine_request([5], grammar=A)))
    assert len(compiled) == 1
    ready(holder, holder.begin(engine_request([5], grammar=A, root=OTHER_ROOT)))
    assert len(compiled) == 2
    bad = [holder.begin(engine_request([5], grammar="start: nowhere")) for _ in range(3)]
    for choice in bad:
        with pytest.raises(ConstraintFailed):
            ready(holder, choice)
    assert len(compiled) == 3


def test_a_choice_does_not_wait_for_ever_and_waiting_is_not_its_fault(make: MakeHolder) -> None:
    released, clock = threading.Event(), Clock()

    def slow() -> LLTokenizer:
        released.wait(60)
        return vocabulary()

    holder = make(slow, clock)
    choices = [holder.begin(engine_request([5], grammar=A)) for _ in range(holding.NUM_THREADS + 1)]
    assert not any(choice.is_ready() for choice in choices)
    clock.now = SECONDS + 1
    for choice in choices:
        with pytest.raises(ConstraintFailed, match="too many grammars") as caught:
            choice.is_ready()
        assert caught.value.code is RefusalCode.OVERLOADED
        choice.end()
    released.set()
    assert ready(holder, holder.begin(engine_request([5], grammar=A))).allowed()


def test_what_a_grammar_itself_takes_is_its_fault(make: MakeHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = threading.Event()

    def compute(tokens: LLTokenizer, grammar: str) -> LLMatcher:
        while time.thread_time() < 0.2:
            pass
        computed.set()
        threading.Event().wait(0.2)
        return compile_grammar(tokens, grammar)

    clock = Clock()
    holder = make(clock=clock, seconds=0.2)
    ready(holder, holder.begin(engine_request([5], grammar=A)))
    monkeypatch.setattr(holding, "compile_grammar", compute)
    choice = holder.begin(engine_request([5], grammar="start: /b/"))
    computed.wait(30)
    clock.now = 1.0
    with pytest.raises(ConstraintFailed, match=r"takes more than 0.2 s") as caught:
        choice.is_ready()
    assert caught.value.code is RefusalCode.INVALID_REQUEST


def test_a_tenant_that_floods_waits_behind_itself(make: MakeHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    released, begun = threading.Event(), list[str]()

    def slow(tokens: LLTokenizer, grammar: str) -> LLMatcher:
        begun.append(grammar)
        if "f" in grammar:
            released.wait(60)
        return compile_grammar(tokens, grammar)

    monkeypatch.setattr(holding, "compile_grammar", slow)
    holder = make()
    flood = [
        holder.begin(engine_request([5], grammar=f'start: "f{number}"', tenant=b"flood"))
        for number in range(20)
    ]
    other = holder.begin(engine_request([5], grammar=A, tenant=b"other", root=OTHER_ROOT))
    assert ready(holder, other).allowed()
    assert len(begun) == 3
    assert not any(choice.is_ready() for choice in flood)
    released.set()
    for choice in flood:
        ready(holder, choice).end()


def test_an_answer_that_takes_its_grammar_too_far_is_cut_off_and_spoils_no_other(make: MakeHolder) -> None:
    holder = make()
    schema = '{"type": "string", "minLength": 1000000000}'
    (quote,), (letter,) = (vocabulary().tokenize_str(text) for text in '"a')
    long = engine_request([5], grammar=f"start: %json {schema}")
    answers = [ready(holder, holder.begin(long)) for _ in range(2)]
    answers[0].consume(quote)
    with pytest.raises(ConstraintExhausted):
        for _ in range(100_000):
            answers[0].allowed()
            answers[0].consume(letter)
    with pytest.raises(ConstraintExhausted):
        answers[1].consume(quote)
    after = ready(holder, holder.begin(long))
    assert not after.consume(quote)
    assert letter in after.allowed()


def test_a_tenant_has_half_of_what_may_be_held(make: MakeHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "MAX_HELD", 4)
    holder = make()
    held = [holder.begin(engine_request([5], grammar=A, tenant=b"flood")) for _ in range(2)]
    with pytest.raises(RequestRefused) as caught:
        holder.begin(engine_request([5], grammar=A, tenant=b"flood"))
    assert caught.value.code is RefusalCode.OVERLOADED
    assert holder.begin(engine_request([5], grammar=A, tenant=b"other"))
    held[0].end()
    assert holder.begin(engine_request([5], grammar=A, tenant=b"flood"))


def test_grammars_that_take_too_much_memory_are_refused(make: MakeHolder) -> None:
    holder = make()
    num_bytes = memory.MAX_BYTES // 4
    held = [
        holder.begin(engine_request([5], grammar=f'start: "{n}"', grammar_bytes=num_bytes, tenant=b"flood"))
        for n in range(2)
    ]
    with pytest.raises(RequestRefused, match="memory") as caught:
        holder.begin(engine_request([5], grammar=A, grammar_bytes=num_bytes, tenant=b"flood"))
    assert caught.value.code is RefusalCode.OVERLOADED
    assert holder.num_held == 2
    for choice in held:
        ready(holder, choice).end()
    assert holder.memory.num_bytes == 0
    assert holder.memory.num_kept_bytes <= memory.MAX_KEPT_BYTES


def test_choices_that_are_held_are_counted(make: MakeHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "MAX_HELD", 2)
    holder = make()
    first, second = (holder.begin(engine_request([5], grammar=A)) for _ in range(2))
    with pytest.raises(RequestRefused) as caught:
        holder.begin(engine_request([5], grammar=A))
    assert caught.value.code is RefusalCode.OVERLOADED
    first.end()
    first.end()
    holder.begin(engine_request([5], grammar=A))
    second.end()
    assert holder.num_held == 1


def test_a_tokenizer_that_cannot_be_read_refuses_grammars_and_nothing_else(make: MakeHolder) -> None:
    def unreadable() -> LLTokenizer:
        raise NoVocabulary("it is in runes")

    holder = make(unreadable)
    with pytest.raises(ConstraintFailed, match="cannot be held to a grammar: it is in runes"):
        ready(holder, holder.begin(engine_request([5], grammar=A)))


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"{}"}, {"tokenizer.json": b"\xff"}])
def test_what_is_no_tokenizer_is_no_vocabulary(files: dict[str, bytes]) -> None:
    with pytest.raises(NoVocabulary):
        read_vocabulary(TokenizerBundle(files), 2048, EOS)
