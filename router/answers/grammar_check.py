"""Checks whether llguidance can follow a grammar, before any replica is asked.

Owns the stand-in vocabulary: one token per byte. The limits of the engines bound most of what a client's
schema or regular expression costs. Divisors, patterns that must all match, and names by pattern can take any
time and memory: callers run this for clients in a process that can be killed.
"""

import functools
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from replicas.protocol.grammar_bounds import MAX_GRAMMAR_CHARACTERS, PARSER_LIMITS, why_not_followed
from router.answers.grammars import TOOL_PARAMETER
from router.errors import InvalidRequest
from router.memory import heap_bytes

_LIMITS = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
MAX_GRAMMAR_TEXT_CHARACTERS = 64 * 1024
MAX_RULES = 400
MAX_RULE_LEVELS = 1_000
"""Rules, with the brackets within each. llguidance follows them from one to the next on the machine's stack,
and bears twice as many."""
_RULE = re.compile(r"(?m)^\s*[?!]*[\w-]+(?:\[[^\n]*\]|\{[^\n]*\}|::\s*\w+)?(?:\.\d+)?\s*:(?!:)")
_BRACKET = re.compile(r"[()\[\]]")
_JSON_RULE = re.compile(r"%\s*json\b")
_NUM_BYTES = 256

MAX_TRIAL_TOKENS = 8
"""Free choices in the trial answer that shows whether a grammar can be followed beyond its first token."""

FEW_STATES_BYTES = 4 << 20
MANY_STATES_BYTES = 48 << 20
"""Most memory that answers add to a grammar that counts or has patterns."""
_COUNTS = re.compile(
    r'"(?:minLength|maxLength|pattern|patternProperties|format|multipleOf|(?:exclusiveM|m)(?:in|ax)imum)"'
)


class FollowedGrammar(NamedTuple):
    """`num_bytes` is the memory for following it: measured when built, plus the most that answers add."""

    text: str
    num_bytes: int


class CheckedGrammar(msgspec.Struct, frozen=True, tag=True):
    """A compiled grammar ("" for none), the memory to follow it, and the processor time that compiling took
    for this request."""

    text: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


ANY_TEXT = CheckedGrammar()


class _GrammarTrial(NamedTuple):
    problem: str | None
    num_bytes: int = 0


def checked_grammar(
    grammar: str,
    *,
    parameter: str | None,
    special_tokens: Collection[str] = (),
    tool_parameter: str = TOOL_PARAMETER,
) -> FollowedGrammar:
    """Return a grammar of `grammar_for` in the form that can be followed. Blocks while it compiles.

    The arguments of a non-strict tool become any object if its schema cannot be followed. Raises
    InvalidRequest if anything else cannot, with `parameter` for the text's form.
    """
    if not grammar:
        return FollowedGrammar("", 0)
    vocabulary = byte_vocabulary(tuple(sorted(special_tokens)))
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    for part in parts[1:]:
        if "lark_grammar" in part:
            part["lark_grammar"] = _in_lark(part["lark_grammar"], parameter)
    grammar = json.dumps({"grammars": parts}, ensure_ascii=False)
    trial = _tried(grammar, vocabulary)
    if trial.problem is not None:
        grammar = _loosened(parts, vocabulary, parameter, tool_parameter)
        trial = _tried(grammar, vocabulary)
    if trial.problem is not None:
        raise InvalidRequest(f"the answer cannot be held to this: {trial.problem}", parameter=parameter)
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"the schemas have {len(grammar)} characters together, and may have {MAX_GRAMMAR_CHARACTERS}",
            parameter=parameter,
        )
    return FollowedGrammar(grammar, trial.num_bytes + _growth(json.loads(grammar)["grammars"][1:]))


def _growth(parts: Sequence[dict[str, Any]]) -> int:
    """llguidance makes the states of its automata as answers come to them."""
    has_many = any("lark_grammar" in part or _COUNTS.search(json.dumps(part)) for part in parts)
    return MANY_STATES_BYTES if has_many else FEW_STATES_BYTES


def _in_lark(text: str, parameter: str | None) -> str:
    """Convert GBNF, which clients may write too, to Lark. Raises InvalidRequest."""
    if len(text) > MAX_GRAMMAR_TEXT_CHARACTERS:
        raise InvalidRequest(
            f"the grammar has {len(text)} characters, and may have {MAX_GRAMMAR_TEXT_CHARACTERS}",
            parameter=parameter,
        )
    if _JSON_RULE.search(text):
        raise InvalidRequest("a grammar has no %json here: ask for a JSON schema", parameter=parameter)
    try:
        lark = any_to_lark(text)
    except Exception as error:  # whatever the converter has raised: it names no class of its own
        raise InvalidRequest(f"the grammar cannot be read: {error}", parameter=parameter) from error
    rules = _RULE.split(lark)
    num_levels = sum(1 + _nesting(rule) for rule in rules)
    if len(rules) > MAX_RULES or num_levels > MAX_RULE_LEVELS:
        raise InvalidRequest(
            f"the grammar has {len(rules)} rules, with {num_levels} levels of brackets; it may have "
            f"{MAX_RULES} and {MAX_RULE_LEVELS}",
            parameter=parameter,
        )
    return lark


def _nesting(rule: str) -> int:
    """How deep its brackets are, at the most: those in quotes are counted, too."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(rule):
        depth = max(0, depth + (1 if bracket in "([" else -1))
        deepest = max(deepest, depth)
    return deepest


def _loosened(
    parts: Sequence[dict[str, Any]], vocabulary: LLTokenizer, parameter: str | None, tool_parameter: str
) -> str:
    """Return the grammar without the schemas of tools that are not strict and cannot be followed. Raises
    InvalidRequest if anything else cannot, alone."""
    kept = [parts[0]]
    for part in parts[1:]:
        name: str = part["name"]
        problem = _tried(json.dumps({"grammars": [part]}, ensure_ascii=False), vocabulary).problem
        if name == "text":
            if problem is not None:
                raise InvalidRequest(f"the answer cannot be held to this: {problem}", parameter=parameter)
            kept.append(part)
            continue
        kind, number, *its_parameter = name.split("_")
        if problem is not None and kind == "strict":
            raise InvalidRequest(
                f"arguments cannot be held to this schema: {problem}", parameter=tool_parameter.format(number)
            )
        if problem is not None:
            anything = {} if its_parameter else {"type": "object"}
            part = {
                "name": name,
                "json_schema": {**anything, "x-guidance": part["json_schema"]["x-guidance"]},
            }
        kept.append(part)
    return json.dumps({"grammars": kept}, ensure_ascii=False)


def _tried(grammar: str, vocabulary: LLTokenizer) -> _GrammarTrial:
    """Why llguidance cannot follow it, if so: found by beginning an answer."""
    before = heap_bytes()
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    for _ in range(MAX_TRIAL_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        token = _next_of(matcher.compute_bitmask(), vocabulary.vocab_size)
        if token is None or matcher.is_error() or not matcher.consume_token(token):
            break
        matcher.consume_tokens(matcher.compute_ff_tokens())
    if matcher.is_error():
        return _GrammarTrial(why_not_followed(matcher.get_error()))
    return _GrammarTrial(None, max(0, heap_bytes() - before))


def _next_of(mask: bytes, vocab_size: int) -> int | None:
    """Choose a next token that makes progress: a mark, else an opening character of JSON."""
    allowed = int.from_bytes(mask, "little") & (1 << vocab_size) - 1
    marks = allowed >> (_NUM_BYTES + 1)
    if marks:
        return _NUM_BYTES + 1 + (marks & -marks).bit_length() - 1
    for byte in b'{["':
        if allowed >> byte & 1:
            return byte
    texts = allowed & (1 << _NUM_BYTES) - 1
    return (texts & -texts).bit_length() - 1 if texts else None


class _Bytes:
    """The tokenizer interface that llguidance needs."""

    bos_token_id = None

    def __init__(self, special_tokens: Sequence[str]) -> None:
        specials = ["<|end|>", *(token for token in special_tokens if token != "<|end|>")]
        self.tokens = [bytes([byte]) for byte in range(_NUM_BYTES)]
        self.tokens += [b"\xff" + token.encode() for token in specials]
        self.eos_token_id = _NUM_BYTES
        self.special_token_ids = list(range(_NUM_BYTES, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.lru_cache(maxsize=16)
def byte_vocabulary(special_tokens: tuple[str, ...]) -> LLTokenizer:
    """One for each model that is served; they are small."""
    return LLTokenizer(TokenizerWrapper(_Bytes(special_tokens)))


class WishedGrammar(NamedTuple):
    """An answer's requested grammar, "" for none, and the fields that requested it."""

    text: str
    parameter: str = ""
    tool_parameter: str = ""
    special_tokens: tuple[str, ...] = ()


NO_GRAMMAR = WishedGrammar("")
