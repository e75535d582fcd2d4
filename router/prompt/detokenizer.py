"""Detokenizer: turns one choice's token ids into text, incrementally.

Owns an unfinished character, which cannot be emitted yet. The caller knows why a generation ended.

The joined text equals decoding all tokens at once, however they were grouped.
"""

import json
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tokenizers

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""No character takes more tokens than this; a longer wait means bytes that will never be a character."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of every token id in a byte-level vocabulary."""

    with_special: tuple[bytes, ...]
    without_special: tuple[bytes, ...]

    def showing(self, token_ids: Iterable[int]) -> tuple[bytes, ...]:
        """Return the bytes without special tokens, except these."""
        shown = list(self.without_special)
        for token_id in token_ids:
            shown[token_id] = self.with_special[token_id]
        return tuple(shown)


class Detokenizer(Protocol):
    """`add` the engine's tokens; `finish` at its end."""

    def add(self, token_ids: Sequence[int], /) -> str:
        """Return the text that is now certain."""
        ...

    def finish(self) -> str:
        """Emit what was held back at the end."""
        ...


def new_detokenizer(
    tokenizer: tokenizers.Tokenizer,
    token_bytes: tuple[bytes, ...] | None,
    *,
    hidden: frozenset[int] = frozenset(),
) -> Detokenizer:
    """Return a detokenizer. `token_bytes` are the bytes of each token of a byte-level vocabulary; with any
    other, `hidden` ones show nothing."""
    return _WindowPieces(tokenizer, hidden) if token_bytes is None else _BytePieces(token_bytes)


class _BytePieces:
    """Byte-level vocabularies: every token is some bytes, and UTF-8 decodes incrementally."""

    __slots__ = ("_token_bytes", "_unfinished")

    def __init__(self, token_bytes: tuple[bytes, ...]) -> None:
        self._token_bytes = token_bytes
        self._unfinished = b""

    def add(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        if len(token_ids) == 1 and token_ids[0] < len(token_bytes):
            data = token_bytes[token_ids[0]]
        else:  # models are padded beyond their vocabulary; such ids stand for nothing
            data = b"".join([token_bytes[i] for i in token_ids if i < len(token_bytes)])
        if self._unfinished:
            data = self._unfinished + data
        text, num_read = utf_8_decode(data, "replace")
        self._unfinished = data[num_read:]
        return text

    def finish(self) -> str:
        text, self._unfinished = self._unfinished.decode("utf-8", "replace"), b""
        return text


class _WindowPieces:
    """Any other decoder: decodes a short window of tokens again and emits what is new at its end."""

    __slots__ = ("_end_said", "_hidden", "_tokenizer", "_window")

    def __init__(self, tokenizer: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._end_said = 0
        """Tokens at the window's start whose text is out already; they give the others their context."""

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join([self._add_one(token_id) for token_id in token_ids if token_id not in self._hidden])

    def finish(self) -> str:
        text = self._new_text()
        self._window.clear()
        self._end_said = 0
        return text

    def _add_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        num_waiting = len(self._window) - self._end_said
        if (text.endswith(REPLACEMENT) or not text) and num_waiting < MAX_HELD_TOKENS:
            return ""
        del self._window[: self._end_said]
        self._end_said = len(self._window)
        return text

    def _new_text(self) -> str:
        said: str = self._tokenizer.decode(self._window[: self._end_said], skip_special_tokens=False)
        everything: str = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return everything[len(said) :]


def token_bytes_of(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    """Return the table of a byte-level vocabulary; None if the tokenizer's decoder is of another kind."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return None
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    with_special = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            with_special[token_id] = bytes([byte_of[character] for character in token])
        except KeyError:  # an added token that is not written in the byte alphabet
            with_special[token_id] = token.encode()
    without_special = list(with_special)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            without_special[token_id] = b""
    return TokenBytes(tuple(with_special), tuple(without_special))


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level vocabularies write for each byte (GPT-2's alphabet)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters: list[str] = []
    num_moved = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + num_moved))
            num_moved += 1
    return characters
