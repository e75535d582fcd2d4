"""Texts against a grammar, and texts out of one, byte by byte."""

import random
import re
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher

from router.answers.grammar_check import byte_vocabulary

END = 256
FREE = 100
"""So many bytes may come next where text is free: in bare values, which would not end by chance."""
VALUE_END = list(b"\n</parameter>\n")


def follows(grammar: str, text: str, special_tokens: Collection[str] = ()) -> bool:
    """Whether the whole text is an answer. Special tokens that stand in it are tokens."""
    matcher = LLMatcher(byte_vocabulary(tuple(sorted(special_tokens))), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    wanted: list[int] = []
    specials = sorted(special_tokens)
    pattern = "|".join(map(re.escape, specials)) or "(?!)"
    for position, piece in enumerate(re.split(f"({pattern})", text)):
        wanted += [END + 1 + specials.index(piece)] if position % 2 else piece.encode()
    return bool(matcher.try_consume_tokens(wanted) == len(wanted) and matcher.is_accepting())


def random_answer(grammar: str, rng: random.Random, most: int = 3000) -> str:
    """One that the grammar allows, ended as soon as a coin says so."""
    matcher = LLMatcher(byte_vocabulary(()), grammar, log_level=0)
    said: list[int] = []
    while not matcher.is_stopped():
        assert len(said) < most, bytes(said)
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)).tolist()
        if END in allowed and rng.random() < 0.3:
            break
        printable = [token for token in allowed if 32 <= token < 127] or [t for t in allowed if t != END]
        tokens = [rng.choice(printable)]
        if (
            len(allowed) >= FREE
            and rng.random() < 0.1
            and matcher.validate_tokens(VALUE_END) == len(VALUE_END)
        ):
            tokens = VALUE_END
        said += tokens
        assert matcher.consume_tokens(tokens), matcher.get_error()
    return bytes(said).decode()
