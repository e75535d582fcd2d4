"""Matcher: one choice's position in its grammar.

Owns llguidance's matcher, and when the answer may end: at an end token only where the grammar allows it;
before `min_tokens`, or at all with `ignore_eos`, only where the grammar allows nothing else.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from replicas.grammars.constraint import ConstraintExhausted, ConstraintFailed
from replicas.protocol.frames import SamplingParams
from replicas.protocol.grammar_bounds import PARSER_LIMITS, why_not_followed

LIMITS = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]

_FORBIDDEN = re.compile(r"doesn't satisfy the grammar|parser stopped")
"""llguidance's message for a forbidden token. Any other message is one of its limits."""

Masks = npt.NDArray[np.int32]
"""A row for each choice: a bit for each token of the vocabulary, the lowest first."""


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of the grammar, to be copied. Raises ConstraintFailed.

    The first mask is computed at once: for some grammars it takes longest.
    """
    inner = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if not inner.is_error():
        inner.compute_bitmask()
    if inner.is_error():
        raise ConstraintFailed(f"the grammar cannot be followed: {reason(inner)}")
    return inner


def reason(inner: LLMatcher) -> str:
    """Why it goes no further."""
    return why_not_followed(inner.get_error())


class Matcher:
    """Takes the existing `output` of a resumed choice. Raises ConstraintFailed if it does not fit, and
    ConstraintExhausted."""

    def __init__(
        self,
        inner: LLMatcher,
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        output: Sequence[int] = (),
    ) -> None:
        self.inner = inner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sampling = sampling
        self._num_output_tokens = len(output)
        self._num_after_end = 0
        """Tokens after the end of a grammar that could not continue; llguidance does not know them."""
        if output and not inner.consume_tokens(list(output)):
            if not _FORBIDDEN.search(inner.get_error()):
                raise ConstraintExhausted
            raise ConstraintFailed(f"the output so far does not follow the grammar: {reason(inner)}")

    @property
    def is_complete(self) -> bool:
        """Whether only an end token can follow."""
        return self.inner.is_stopped()

    def consume(self, token_id: int) -> bool:
        """The next token; whether the answer is complete with it. Raises ConstraintFailed for one that the
        grammar forbids, and ConstraintExhausted."""
        if self.is_complete and not self.inner.is_error():
            self._num_output_tokens += 1
            self._num_after_end += 1
            return True
        if not self.inner.consume_token(token_id) or self.inner.is_error():
            if _FORBIDDEN.search(self.inner.get_error()):
                raise ConstraintFailed(f"the grammar could not be followed further: {reason(self.inner)}")
            raise ConstraintExhausted
        self._num_output_tokens += 1
        return self.is_complete

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        self._num_output_tokens -= num_tokens
        num_after_end = min(num_tokens, self._num_after_end)
        self._num_after_end -= num_after_end
        if not self.inner.rollback(num_tokens - num_after_end):
            raise ConstraintFailed(f"the grammar cannot be followed back: {reason(self.inner)}")

    def put_off_end(self, mask: Masks) -> None:
        """Remove end tokens that would come too early from its row, unless nothing else is left."""
        sampling = self._sampling
        is_early = self._num_output_tokens < sampling.min_tokens
        ends = {*self._eos_token_ids} if is_early or sampling.ignore_eos else set()
        if is_early:
            ends.update(sampling.stop_token_ids)
        ids = np.array([token for token in ends if token < 32 * len(mask)], dtype=np.int64)
        if not len(ids):
            return
        without = mask.view(np.uint32).copy()
        np.bitwise_and.at(without, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        if without.any():
            mask[:] = without.view(np.int32)


def fill_masks(matchers: Sequence[Matcher], executor: LLExecutor, masks: Masks) -> None:
    """Fill `masks`, a row per matcher. A matcher that fails reports it at its next token."""
    fill_next_token_bitmask_par(
        executor, [(matcher.inner, row) for row, matcher in enumerate(matchers)], masks
    )
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.put_off_end(mask)
