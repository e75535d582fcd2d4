"""Tokenizer: equal to the reference, with and without its cache."""

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Reference

from replicas.protocol.status import TokenizerBundle
from router.prompt.quoting import Quoter, unquote
from router.prompt.segments import SegmentCache
from router.prompt.tokenizer import Tokenizer, TokenizerError
from tests.router import tiny_model

REFERENCE = Reference.from_buffer(tiny_model.tokenizer_json())
TOKENIZER = Tokenizer(tiny_model.bundle())

pieces = st.one_of(
    st.text(), st.sampled_from([*tiny_model.SPECIAL_TOKENS, " ", "\n", "<|", "|>", "Hello world"])
)
texts = st.lists(pieces, max_size=12).map("".join)


def _changed(change: object) -> Tokenizer:
    reference = Reference.from_buffer(tiny_model.tokenizer_json())
    change(reference)  # type: ignore[operator]
    return Tokenizer(TokenizerBundle({"tokenizer.json": reference.to_str().encode()}))


def test_the_fast_backend_and_the_segment_cache_are_used_where_they_are_proven() -> None:
    assert TOKENIZER.backend == "fastokens"
    assert TOKENIZER.caches_segments


@given(texts)
def test_ids_equal_those_of_the_reference_cached_or_not(text: str) -> None:
    expected = REFERENCE.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.encode(text) == expected
    assert TOKENIZER.encode(text) == expected


def test_a_second_turn_encodes_only_what_is_new() -> None:
    tokenizer = Tokenizer(tiny_model.bundle())
    first = "<|im_start|>user\nHello world<|im_end|>"
    tokenizer.encode(first)
    before = (tokenizer.cache.num_hits, tokenizer.cache.num_misses)
    tokenizer.encode(first + "<|im_start|>assistant\nHello again<|im_end|>")
    assert (tokenizer.cache.num_hits, tokenizer.cache.num_misses) == (before[0] + 1, before[1] + 1)


def test_a_tokenizer_whose_special_tokens_swallow_spaces_is_not_cut_at_them() -> None:
    def strip(reference: Reference) -> None:
        reference.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])

    tokenizer = _changed(strip)
    assert not tokenizer.caches_segments
    reference = Reference.from_buffer(tiny_model.tokenizer_json())
    strip(reference)
    text = "Hello   <mask> world"
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_that_treats_the_first_word_differently_is_not_cut_either() -> None:
    def prepend(reference: Reference) -> None:
        reference.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(replacement="_", prepend_scheme="first"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    tokenizer = _changed(prepend)
    assert not tokenizer.caches_segments
    reference = Reference.from_buffer(tiny_model.tokenizer_json())
    prepend(reference)
    text = "Hello<|im_end|>Hello"
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_plain_prompts_get_what_the_post_processor_adds_and_chats_do_not() -> None:
    def add_bos(reference: Reference) -> None:
        reference.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )

    tokenizer = _changed(add_bos)
    plain = tokenizer.encode("Hello")
    assert plain == REFERENCE.encode("Hello").ids
    assert tokenizer.encode("Hello", add_special_tokens=True) == [0, *plain]
    assert tokenizer.encode("", add_special_tokens=True) == [0]


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    def truncate(reference: Reference) -> None:
        reference.enable_truncation(4)
        reference.enable_padding(length=64)

    text = "Hello world, hello again, and again."
    assert _changed(truncate).encode(text) == REFERENCE.encode(text).ids


@given(texts, texts)
def test_tokens_through_a_position_are_a_prefix_of_the_whole(head: str, tail: str) -> None:
    text = head + "<|im_end|>" + tail
    number = TOKENIZER.num_tokens_through(text, len(head))
    assert TOKENIZER.encode(text)[:number] == TOKENIZER.encode(head)


@given(texts, st.integers(0, 200), st.booleans())
def test_tokens_within_a_position_end_there_at_the_latest(text: str, end: int, is_quoted: bool) -> None:
    end = min(end, len(text))
    sent = Quoter(tiny_model.SPECIAL_TOKENS).quote(text) if is_quoted else text
    token_ids = TOKENIZER.encode(sent, is_quoted=is_quoted)
    number = TOKENIZER.num_tokens_within(sent, end, is_quoted=is_quoted)
    spans = [len(TOKENIZER.token_text(token_id)[1]) for token_id in token_ids]
    ends = [sum(spans[: each + 1]) for each in range(len(spans))]
    num_bytes = len((unquote(sent[:end]) if is_quoted else text[:end]).encode())
    assert number == sum(each <= num_bytes for each in ends)


@given(texts)
def test_no_token_stands_for_more_characters_than_the_longest(text: str) -> None:
    assert TOKENIZER.longest_token is not None
    assert len(text) <= TOKENIZER.longest_token * len(TOKENIZER.encode(text))


def test_the_longest_token_allows_for_composing_and_is_unknown_where_text_is_lost() -> None:
    def compose(reference: Reference) -> None:
        reference.normalizer = normalizers.NFC()

    def lose(reference: Reference) -> None:
        reference.normalizer = normalizers.Strip()

    composing = _changed(compose)
    text = "\u1f82" * 30
    decomposed = unicodedata.normalize("NFD", text)
    assert len(decomposed) == 4 * len(text)
    assert composing.longest_token == 4 * TOKENIZER.longest_token
    assert len(decomposed) <= composing.longest_token * len(composing.encode(decomposed))
    assert _changed(lose).longest_token is None


async def test_long_new_texts_are_encoded_in_a_thread_with_the_same_result() -> None:
    text = "The quick brown fox. " * 5000
    assert await TOKENIZER.encode_async(text) == REFERENCE.encode(text).ids


def test_several_threads_may_encode_at_once() -> None:
    texts = [f"Hello {number}<|im_end|>world {number % 7}" for number in range(200)]
    tokenizer = Tokenizer(tiny_model.bundle(), cache_bytes=4000)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [REFERENCE.encode(text).ids for text in texts]


def test_the_cache_stays_within_its_bytes_and_drops_what_was_used_longest_ago() -> None:
    cache = SegmentCache(3000)
    for number in range(100):
        cache.put(f"text {number}", (number,) * 4)
        cache.get("text 0")
    statistics = cache
    assert 0 < statistics.num_bytes <= 3000
    assert cache.get("text 0") == (0,) * 4
    assert cache.get("text 1") is None
    cache.put("giant", (0,) * 1000)
    assert cache.get("giant") is None


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"{"}, {"tokenizer.json": json.dumps({}).encode()}])
def test_a_bundle_without_a_readable_tokenizer_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer(TokenizerBundle(files))


@given(texts, st.data())
def test_a_token_stands_where_the_text_of_those_before_it_ends(text: str, data: st.DataObject) -> None:
    token_ids = TOKENIZER.encode(text)
    number = data.draw(st.integers(0, len(token_ids)))
    before = TOKENIZER.decode(token_ids[:number]).rstrip("\ufffd")  # of an unfinished character
    position = TOKENIZER.characters_before(text, token_ids, number)
    assert text[:position].rstrip("\ufffd") == before


@given(texts, st.data())
def test_what_tokens_say_is_their_text_with_the_place_of_one_of_them(text: str, data: st.DataObject) -> None:
    token_ids = TOKENIZER.encode(text)
    number = data.draw(st.integers(0, len(token_ids)))
    said, start, end = TOKENIZER.text_around(token_ids, number)
    assert said == TOKENIZER.decode(token_ids)
    assert said[:start] == TOKENIZER.decode(token_ids[:number]).rstrip("\ufffd") or "\ufffd" in said
    assert (start == end == len(said)) if number == len(token_ids) else start <= end <= len(said)


def test_an_id_that_is_in_no_vocabulary_says_nothing() -> None:
    text = "Hello world"
    token_ids = TOKENIZER.encode(text)
    assert TOKENIZER.text_around([*token_ids, 10**6], len(token_ids))[:2] == (text, len(text))


@given(texts, st.data())
def test_a_token_stands_in_a_quoted_text_where_it_stands_unquoted(text: str, data: st.DataObject) -> None:
    quoted = "<|im_start|>" + Quoter(tiny_model.SPECIAL_TOKENS).quote(text) + "<|im_end|>"
    token_ids = TOKENIZER.encode(quoted, is_quoted=True)
    number = data.draw(st.integers(1, len(token_ids) - 1))
    before = TOKENIZER.decode(token_ids[1:number]).rstrip("\ufffd")
    position = TOKENIZER.characters_before(quoted, token_ids, number, is_quoted=True)
    assert text[: position - len("<|im_start|>")].rstrip("\ufffd") == before


def test_tokens_that_do_not_say_the_text_put_nothing_beyond_the_next_special_token_out_of_place() -> None:
    text = "<|im_start|>user\nHello world<|im_end|><|im_start|>assistant\nHello again<|im_end|>"
    token_ids = TOKENIZER.encode(text)
    other = TOKENIZER.encode("<|im_start|>user\nHello whole <|endoftext|> wide world<|im_end|>")
    rest = TOKENIZER.encode("<|im_start|>assistant\nHello again<|im_end|>")
    for back in range(1, len(rest)):
        expected = TOKENIZER.characters_before(text, token_ids, len(token_ids) - back)
        assert TOKENIZER.characters_before(text, [*other, *rest], len(other) + len(rest) - back) == expected


def test_a_tokenizer_that_composes_tells_characters_as_they_were_sent() -> None:
    def compose(reference: Reference) -> None:
        reference.normalizer = normalizers.NFC()

    tokenizer = _changed(compose)
    text = "<|im_start|>cafe\u0301 Hello<|im_end|>"
    token_ids = tokenizer.encode(text)
    hello = next(n for n in range(len(token_ids)) if "H" in tokenizer.decode(token_ids[: n + 1]))
    assert text[tokenizer.characters_before(text, token_ids, hello) :].lstrip().startswith("Hello")
