"""Detokenizer: the text of a stream is that of the whole."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models

from router.prompt.detokenizer import Detokenizer, new_detokenizer
from router.prompt.tokenizer import Tokenizer
from tests.router import tiny_model

REFERENCE = Reference.from_buffer(tiny_model.tokenizer_json())
TOKENIZER = Tokenizer(tiny_model.bundle())
VOCAB_SIZE = REFERENCE.get_vocab_size()

token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60)
cuts = st.lists(st.integers(1, 5), min_size=60, max_size=60)


def _stream(detokenizer: Detokenizer, tokens: Sequence[int], sizes: Sequence[int]) -> list[str]:
    said: list[str] = []
    start = 0
    for size in sizes:
        if start >= len(tokens):
            break
        said.append(detokenizer.add(tokens[start : start + size]))
        start += size
    said.append(detokenizer.finish())
    return said


@given(token_ids, cuts)
def test_random_tokens_come_out_as_decoding_them_at_once(tokens: list[int], sizes: list[int]) -> None:
    said = _stream(TOKENIZER.new_detokenizer(), tokens, sizes)
    assert "".join(said) == REFERENCE.decode(tokens, skip_special_tokens=True)


@given(st.text(), cuts)
def test_no_piece_ever_holds_a_broken_character(text: str, sizes: list[int]) -> None:
    tokens = REFERENCE.encode(text, add_special_tokens=False).ids
    said = _stream(TOKENIZER.new_detokenizer(), tokens, [1] * (len(tokens) + 1))
    assert "".join(said) == REFERENCE.decode(tokens, skip_special_tokens=True)
    assert sum(piece.count("\ufffd") for piece in said) == text.count("\ufffd")


def test_special_tokens_and_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    hello = REFERENCE.encode("Hello").ids
    detokenizer = TOKENIZER.new_detokenizer()
    assert detokenizer.add([1, *hello, 2, VOCAB_SIZE + 5]) == "Hello"
    assert detokenizer.add([VOCAB_SIZE]) == ""


def test_special_tokens_that_are_to_be_shown_stand_for_their_names() -> None:
    hello = REFERENCE.encode("Hello").ids
    shown = frozenset({"<|im_start|>", "<|no_such_token|>"})
    for _ in range(2):
        detokenizer = TOKENIZER.new_detokenizer(shown)
        assert detokenizer.add([0, 1, *hello, 2, VOCAB_SIZE + 5]) == "<|im_start|>Hello"
        assert TOKENIZER.new_detokenizer(frozenset({"none"})).add([0, 1, *hello]) == "Hello"
        assert TOKENIZER.new_detokenizer().add([0, 1, *hello]) == "Hello"


def _sentencepiece_like() -> Reference:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for word in ("▁Hello", "▁world", "lo", "▁", "é", "日本"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Reference(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _tokens_of(tokenizer: Reference, words: Sequence[str]) -> list[int]:
    tokens: list[int] = []
    for word in words:
        known = tokenizer.token_to_id(word)
        tokens += [known] if known is not None else [byte + 1 for byte in word.encode()]
    return tokens


@given(st.lists(st.sampled_from(["▁Hello", "▁world", "lo", "▁", "é", "日本", "👩", "ß", "x"]), max_size=30))
def test_decoders_of_another_kind_stream_as_they_decode(words: list[str]) -> None:
    tokenizer = _sentencepiece_like()
    tokens = _tokens_of(tokenizer, words)
    detokenizer = new_detokenizer(tokenizer, None)
    said = _stream(detokenizer, tokens, [1] * (len(tokens) + 1))
    assert "".join(said) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in said)


@given(st.lists(st.sampled_from(["▁Hello", "▁", "👩", "<hidden>", "<shown>"]), max_size=30))
def test_other_decoders_show_and_hide_special_tokens_as_well(words: list[str]) -> None:
    tokenizer = _sentencepiece_like()
    tokenizer.add_special_tokens(["<hidden>"])
    tokenizer.add_tokens(["<shown>"])
    tokens = _tokens_of(tokenizer, words)
    hidden = tokenizer.token_to_id("<hidden>")
    detokenizer = new_detokenizer(tokenizer, None, hidden=frozenset({hidden}))
    said = _stream(detokenizer, tokens, [1] * (len(tokens) + 1))
    assert "".join(said) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(said).count("<shown>") == words.count("<shown>")
