"""Tokenizer: one model's text ⇄ token ids, from the files that its replicas serve.

Owns the choice of backend (fastokens where it provably equals the reference, else Hugging Face tokenizers)
and the cache of encoded segments.

A rendered chat is split at its special tokens, which byte-pair merges never cross, and each piece between
them is looked up by its text: a conversation of twenty turns encodes only its newest. Whether a tokenizer
allows that is tested on probe texts when it is loaded. Text between special tokens yields no special token,
even if a quoted text spells one out.
"""

import asyncio
import codecs
import copy
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import fastokens
import tokenizers

from replicas.protocol.status import TokenizerBundle
from router.prompt.detokenizer import Detokenizer, TokenBytes, new_detokenizer, token_bytes_of
from router.prompt.quoting import unquote
from router.prompt.segments import SegmentCache
from router.prompt.token_places import num_characters, stands_before
from router.shared.literals import longest_of

REFERENCE_INLINE_CHARACTERS = 8_000
FAST_INLINE_CHARACTERS = 32_000
"""Texts longer than this are encoded in a thread (both backends release the GIL)."""

LOOK_CHARACTERS = 1_000_000
"""In texts beyond this it is not even counted how much is new."""

PIECE_CHARACTERS = 500_000
"""Tokens of longer texts are counted before they are kept."""

DEFAULT_CACHE_BYTES = 64 * 2**20

MAX_COMPOSED = 4
"""How many characters become one, at most, where a tokenizer composes (Unicode's NFC)."""

PROBES = (
    "Hello, world! It's 2024-05-17 at 10:45, isn't it?",
    "  leading spaces\n\n\nand\tblank lines  \r\n   trailing   ",
    "def f(x: int) -> str:\n    return f'{x!r:>10}' * 3  # comment\n",
    "Ünïcödé: naïve café, Straße, Ελληνικά, русский, 日本語のテキスト, 한국어, العربية, हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇩🇰 👍🏽 and e\u0301 against é, ﬁ, ½, ²",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0123456789012345678901234567890",
    '{"key": [1, 2.5, -3e10, null, true], "nested": {"a": "b\\n"}}',
    "\x00\x01\x7f\u00a0\u2028\ufeff�",
    "",
    " ",
    "\n",
)

Encode = Callable[[str], list[int]]

_Showing = tuple[tuple[bytes, ...] | None, frozenset[int]]
"""The bytes of each token in a byte-level vocabulary, and the tokens that show nothing."""


class _Backend(NamedTuple):
    """`encode` recognises special tokens, `encode_text` takes them for text."""

    name: str
    encode: Encode
    encode_text: Encode


class TokenizerError(ValueError):
    """The bundle has no tokenizer, or one that cannot be read."""


class Tokenizer:
    """Encodes and decodes for one model. Safe to use from several threads."""

    def __init__(self, bundle: TokenizerBundle, *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._reference = _load_reference(bundle)
        backend = _choose_backend(self._reference)
        self.backend, self._encode_plain, self._encode_text = backend
        self.inline_characters = (
            FAST_INLINE_CHARACTERS if self.backend == "fastokens" else REFERENCE_INLINE_CHARACTERS
        )
        self.special_tokens = _special_tokens(self._reference)
        self._special_ids = frozenset(self.special_tokens.values())
        added = self._reference.get_added_tokens_decoder().values()
        self.added_tokens = frozenset(token.content for token in added)
        self._token_bytes: TokenBytes | None = token_bytes_of(self._reference)
        self._tables: dict[frozenset[str], _Showing] = {}
        self.vocab_size: int = self._reference.get_vocab_size(with_added_tokens=True)
        self.cache = SegmentCache(cache_bytes)
        self._owner: Hashable = None
        """Owner of the texts, for the cache."""
        self._splitter = _splitter(self._reference, backend, self.special_tokens)
        self._affixes = _affixes(self._reference)
        self.longest_token = _longest_token(self._reference, backend, self._token_bytes)
        """Most characters of a text per token; None if unknown."""

    def within(self, owner: Hashable) -> "Tokenizer":
        """Return the same, that finds no text of another owner's in its cache."""
        view = copy.copy(self)
        view._owner = owner
        return view

    @property
    def caches_segments(self) -> bool:
        """Whether segments were proven to concatenate to the whole."""
        return self._splitter is not None

    def encode(self, text: str, *, add_special_tokens: bool = False, is_quoted: bool = False) -> list[int]:
        """Encode `text`; special tokens written out in it are recognised, quoted ones are not.

        `add_special_tokens` applies the tokenizer's own post-processor (a leading BOS, for example): for
        plain prompts. A chat template writes what it needs itself.
        """
        if add_special_tokens:
            if self._affixes is None:
                return _reference_ids(self._reference, text, add_special_tokens=True)
            prefix, suffix = self._affixes
            return [*prefix, *self.encode(text), *suffix]
        if self._splitter is None:  # what was quoted cannot be encoded apart: it is kept broken by a space
            return self._encode_plain(unquote(text, gap=" ") if is_quoted else text)
        token_ids: list[int] = []
        cached, put, owner = self.cache.get, self.cache.put, self._owner
        special_tokens = self.special_tokens
        for position, piece in enumerate(self._splitter.split(text)):
            if position % 2:
                token_ids.append(special_tokens[piece])
            elif piece:
                if is_quoted:
                    piece = unquote(piece)
                known = cached(piece, owner)
                if known is None:
                    known = tuple(self._encode_text(piece))
                    put(piece, known, owner)
                token_ids += known
        return token_ids

    def encode_within(
        self, most: int, text: str, *, add_special_tokens: bool = False, is_quoted: bool = False
    ) -> list[int] | None:
        """Encode like `encode`; None, early in a long text, if there will be more than about `most` tokens.

        A piece's tokens are those of the whole except at its two ends, and no piece is short.
        """
        if len(text) > max(most, PIECE_CHARACTERS):
            num_tokens = 0
            for start in range(0, len(text), PIECE_CHARACTERS):
                piece = text[start : start + PIECE_CHARACTERS]
                num_tokens += len(self._encode_plain(unquote(piece, gap=" ") if is_quoted else piece))
                if num_tokens > most:
                    return None
        token_ids = self.encode(text, add_special_tokens=add_special_tokens, is_quoted=is_quoted)
        return None if len(token_ids) > most else token_ids

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = False, is_quoted: bool = False
    ) -> list[int]:
        """Encode like `encode`, in a thread if the text is new and long enough to block the loop."""
        if len(text) > self.inline_characters and self._is_long(text):
            return await asyncio.to_thread(
                self.encode, text, add_special_tokens=add_special_tokens, is_quoted=is_quoted
            )
        return self.encode(text, add_special_tokens=add_special_tokens, is_quoted=is_quoted)

    def num_tokens_through(self, text: str, end: int, *, is_quoted: bool = False) -> int:
        """Tokens of `text` up to the first special token at or after character `end`."""
        if self._splitter is not None:
            match = self._splitter.search(text, end)
            end = match.start() if match else len(text)
        return len(self.encode(text[:end], is_quoted=is_quoted))

    def num_tokens_within(self, text: str, end: int, *, is_quoted: bool = False) -> int:
        """Count the tokens of `text` that end at or before character `end`. Tokens with unknown bytes count
        as equally long between special tokens."""
        if self._splitter is None:
            return len(self.encode(text[:end], is_quoted=is_quoted))
        start, stop = 0, len(text)
        for special in self._splitter.finditer(text):
            if special.end() > end:
                stop = special.start()
                break
            start = special.end()
        piece, before = text[start:stop], text[start : min(end, stop)]
        num_tokens = len(self.encode(text[:start], is_quoted=is_quoted))
        token_ids = self.encode(piece, is_quoted=is_quoted)  # known, since the whole has been encoded
        if self._token_bytes is None:
            return num_tokens + len(token_ids) * len(before) // max(1, len(piece))
        num_bytes = len((unquote(before) if is_quoted else before).encode("utf-8", "surrogatepass"))
        token_bytes = self._token_bytes.with_special
        ends = accumulate([len(token_bytes[token_id]) for token_id in token_ids])
        return num_tokens + bisect_right(list(ends), num_bytes)

    def characters_before(
        self, text: str, token_ids: Sequence[int], num_tokens: int, *, is_quoted: bool = False
    ) -> int:
        """Count the characters of `text`, unquoted, in its first `num_tokens` tokens."""
        if self._splitter is None or self._token_bytes is None:
            return min(len(self.decode(token_ids[:num_tokens])), len(unquote(text) if is_quoted else text))
        marks = [(mark.start(), mark.end()) for mark in self._splitter.finditer(text)]
        stands = stands_before(token_ids, num_tokens, marks, self._special_ids, len(text))
        head, piece = text[: stands.start], text[stands.start : stands.stop]
        if is_quoted:
            head, piece = unquote(head), unquote(piece)
        token_bytes = self._token_bytes.with_special
        lengths = [len(token_bytes[token_id]) for token_id in token_ids[stands.first : stands.last]]
        return len(head) + num_characters(piece, sum(lengths[: num_tokens - stands.first]), sum(lengths))

    def text_around(self, token_ids: Sequence[int], number: int) -> tuple[str, int, int]:
        """Return the tokens' text, and the character range of token `number`; beyond the last, the end twice.
        Invalid bytes become U+FFFD."""
        if self._token_bytes is None:
            ends = [len(self.decode(token_ids[:end])) for end in (number, number + 1)]
            return self.decode(token_ids), ends[0], ends[1]
        table = self._token_bytes.with_special
        try:
            pieces = [table[token_id] for token_id in token_ids]
        except IndexError:  # models have made tokens that their vocabulary does not know
            pieces = [table[token_id] if token_id < len(table) else b"" for token_id in token_ids]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = decoder.decode(b"".join(pieces[:number]))
        own = decoder.decode(b"".join(pieces[number : number + 1]))
        text = before + own + decoder.decode(b"".join(pieces[number + 1 :]), final=True)
        return text, len(before), len(before) + len(own)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._reference.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return a single token's text and bytes, special or not."""
        text = self.decode((token_id,))
        if self._token_bytes is not None and 0 <= token_id < len(self._token_bytes.with_special):
            return text, self._token_bytes.with_special[token_id]
        return text, text.encode()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own spelling of each token."""
        return [self._reference.id_to_token(token_id) or "" for token_id in token_ids]

    def new_detokenizer(self, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """Return a detokenizer. Special tokens show nothing, except those in `shown`, which show their
        names."""
        token_bytes, hidden = self._showing(shown)
        return new_detokenizer(self._reference, token_bytes, hidden=hidden)

    def _showing(self, shown: frozenset[str]) -> _Showing:
        """Return the table for `shown`. A model's answers show the same few tokens each time, so there are
        few tables."""
        known = self._tables.get(shown)
        if known is None:
            special = {name: token_id for name, token_id in self.special_tokens.items() if name in shown}
            known = self._tables.get(frozenset(special))
            if known is None:
                hidden = frozenset(self.special_tokens.values()) - frozenset(special.values())
                token_bytes = self._token_bytes
                known = (None if token_bytes is None else token_bytes.showing(special.values()), hidden)
                self._tables[frozenset(special)] = known
            self._tables[shown] = known
        return known

    def _is_long(self, text: str) -> bool:
        """Whether as much of it as is long is new."""
        if self._splitter is None or len(text) > LOOK_CHARACTERS:
            return True
        pieces = self._splitter.split(text)[::2]
        new = sum(len(piece) for piece in pieces if piece and not self.cache.has(piece, self._owner))
        return new > self.inline_characters


def _load_reference(bundle: TokenizerBundle) -> tokenizers.Tokenizer:
    source = bundle.files.get("tokenizer.json")
    if source is None:
        raise TokenizerError("the model has no tokenizer.json")
    try:
        reference = tokenizers.Tokenizer.from_buffer(source)
    except ValueError as error:
        raise TokenizerError(f"the model's tokenizer.json cannot be read: {error}") from error
    reference.no_truncation()
    reference.no_padding()
    return reference


def _reference_ids(
    reference: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False
) -> list[int]:
    # encode() would hold the GIL for the whole text.
    ids: list[int] = reference.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _choose_backend(reference: tokenizers.Tokenizer) -> _Backend:
    source = reference.to_str()
    text_reference = tokenizers.Tokenizer.from_str(source)
    text_reference.encode_special_tokens = True
    slow = _Backend("tokenizers", partial(_reference_ids, reference), partial(_reference_ids, text_reference))
    try:
        fast = _fast_backend(source)
    except (ValueError, NotImplementedError):  # a kind of tokenizer that fastokens lacks
        return slow
    probes = [*PROBES, _joined(PROBES, _special_tokens(reference))]
    try:
        equal = all(
            fast.encode(probe) == slow.encode(probe) and fast.encode_text(probe) == slow.encode_text(probe)
            for probe in probes
        )
    except (ValueError, RuntimeError):
        equal = False
    return fast if equal else slow


def _fast_backend(source: str) -> _Backend:
    tokenizer = fastokens.Tokenizer.from_json_str(source)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    def encode_text(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, split_special_tokens=True).ids
        return ids

    return _Backend("fastokens", encode, encode_text)


def _special_tokens(reference: tokenizers.Tokenizer) -> dict[str, int]:
    added = reference.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special and token.content}


def _splitter(
    reference: tokenizers.Tokenizer, backend: _Backend, special_tokens: dict[str, int]
) -> "re.Pattern[str] | None":
    """Return a pattern that splits at special tokens, if the pieces' ids are those of the whole."""
    added: list[dict[str, Any]] = json.loads(reference.to_str())["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added):
        return None
    if not special_tokens:
        return None
    longest_first = sorted(special_tokens, key=len, reverse=True)
    pattern = re.compile(f"({longest_of(special_tokens)})")
    for separator in longest_first[:8]:
        for probes in (PROBES, PROBES[::-1]):
            text = separator.join(probes)
            expected: list[int] = []
            for position, piece in enumerate(pattern.split(text)):
                if position % 2:
                    expected.append(special_tokens[piece])
                elif piece:
                    expected += backend.encode_text(piece)
            if backend.encode(text) != expected:
                return None
    return pattern


def _affixes(reference: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the tokens that the post-processor adds before and after every text; None if it does something
    else."""
    bare = _reference_ids(reference, PROBES[0])
    full = _reference_ids(reference, PROBES[0], add_special_tokens=True)
    starts = (start for start in range(len(full) - len(bare) + 1) if full[start : start + len(bare)] == bare)
    start = next(starts, None)
    if start is None:
        return None
    prefix, suffix = full[:start], full[start + len(bare) :]
    for probe in PROBES:
        whole = _reference_ids(reference, probe, add_special_tokens=True)
        if whole != prefix + _reference_ids(reference, probe) + suffix:
            return None
    return prefix, suffix


def _longest_token(
    reference: tokenizers.Tokenizer, backend: _Backend, token_bytes: TokenBytes | None
) -> int | None:
    """Return the longest token; None unless every byte of a text, as it is or composed, comes back from its
    tokens."""
    if token_bytes is None:
        return None
    longest = max(map(len, token_bytes.with_special), default=0)
    decoded = [reference.decode(backend.encode(probe), skip_special_tokens=False) for probe in PROBES]
    if decoded == list(PROBES):
        return longest
    if decoded == [unicodedata.normalize("NFC", probe) for probe in PROBES]:
        return longest * MAX_COMPOSED
    return None


def _joined(probes: Sequence[str], special_tokens: dict[str, int]) -> str:
    separators = list(special_tokens)[:8] or [" "]
    return "".join(probe + separators[position % len(separators)] for position, probe in enumerate(probes))
