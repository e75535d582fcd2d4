"""GrammarHolder: choices wait for their grammars, for a bounded time and in bounded numbers."""

import threading
from collections.abc import Callable, Iterator

import pytest
from llguidance import LLTokenizer

from replicas.engine import RequestRefused
from replicas.grammars import holding
from replicas.grammars.constraint import Constraint, ConstraintFailed
from replicas.grammars.holding import GrammarHolder
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

    def make(read: Callable[[], LLTokenizer] = vocabulary, clock: Clock | None = None) -> GrammarHolder:
        made.append(GrammarHolder(read, EOS, seconds=SECONDS, clock=clock or Clock()))
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


def test_grammars_that_are_kept_are_bounded(make: MakeHolder) -> None:
    holder = make()
    for number in range(holding.MAX_KEPT + 5):
        ready(holder, holder.begin(engine_request([5], grammar=f'start: "{number}"')))
    assert len(holder._kept) == holding.MAX_KEPT


def test_a_choice_does_not_wait_for_ever(make: MakeHolder) -> None:
    released, clock = threading.Event(), Clock()

    def slow() -> LLTokenizer:
        released.wait(60)
        return vocabulary()

    holder = make(slow, clock)
    choices = [holder.begin(engine_request([5], grammar=A)) for _ in range(holding.NUM_THREADS + 1)]
    assert not any(choice.is_ready() for choice in choices)
    clock.now = SECONDS + 1
    for choice in choices[:-1]:
        with pytest.raises(ConstraintFailed, match="takes more than 5 s"):
            choice.is_ready()
    with pytest.raises(ConstraintFailed, match="too many grammars") as caught:
        choices[-1].is_ready()
    assert caught.value.code is RefusalCode.OVERLOADED
    released.set()
    assert ready(holder, holder.begin(engine_request([5], grammar=A))).allowed()


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
