"""Maps tokens to positions in their prompt's text, for Tokenizer.characters_before.

Pairs tokens and characters at special tokens, and between them by the tokens' bytes. So tokens that differ
from the text, as those of a continued answer, shift nothing beyond the next special token.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Stand(NamedTuple):
    """From `start` to `stop` are the characters, from `first` to `last` the tokens of the same piece."""

    start: int
    stop: int
    first: int
    last: int


def stands_before(
    token_ids: Sequence[int],
    num_tokens: int,
    marks: Sequence[tuple[int, int]],
    special_ids: Collection[int],
    num_characters: int,
) -> Stand:
    """Return the piece between special tokens that contains token `num_tokens`. `marks` are the text's
    special tokens; if the tokens have more or fewer of them, they are counted from the nearer end."""
    places = [place for place, token_id in enumerate(token_ids) if token_id in special_ids]
    passed = bisect_left(places, num_tokens)
    number = passed
    if len(places) != len(marks) and 2 * num_tokens > len(token_ids):
        number = passed + len(marks) - len(places)
    number = max(0, min(number, len(marks)))
    return Stand(
        marks[number - 1][1] if number else 0,
        marks[number][0] if number < len(marks) else num_characters,
        places[passed - 1] + 1 if passed else 0,
        places[passed] if passed < len(places) else len(token_ids),
    )


def num_characters(text: str, num_bytes: int, most: int) -> int:
    """Return the number of characters whose tokens are the first `num_bytes` of `most`. A tokenizer that
    composes (Unicode's NFC) has fewer bytes than the text."""
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) != most and len(_composed(text)) == most:
        return bisect_left(range(len(text) + 1), num_bytes, key=lambda end: len(_composed(text[:end])))
    return min(len(text), len(encoded[:num_bytes].decode("utf-8", "ignore")))


def _composed(text: str) -> bytes:
    return unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")
