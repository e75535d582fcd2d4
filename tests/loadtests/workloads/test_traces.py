import gzip
import json
from pathlib import Path

import pytest

from loadtests.workloads import ImageSpan, read_trace
from loadtests.workloads.traces import ids_with_images, parse_trace


def line(timestamp: float, input_length: int, hash_ids: list[int], **more: object) -> str:
    record = {"timestamp": timestamp, "input_length": input_length, "output_length": 7, "hash_ids": hash_ids}
    return json.dumps(record | more)


def test_a_trace_is_read_plain_and_compressed(tmp_path: Path) -> None:
    text = line(10, 600, [4, 5]) + "\n\n" + line(20, 512, [4]) + "\n"
    (tmp_path / "tiny.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "tiny.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain = read_trace(tmp_path / "tiny.jsonl", seed=0)
    assert plain == read_trace(tmp_path / "tiny.jsonl.gz", seed=0)
    assert plain.name == "tiny"
    assert [request.arrival_seconds for request in plain.requests] == [0.01, 0.02]
    first = plain.requests[0]
    assert (first.num_input_tokens, first.num_output_tokens, first.prefix_ids) == (600, 7, (4, 5))


def test_arrivals_on_the_grid_are_spread_over_it_in_the_order_of_the_file() -> None:
    lines = [
        line(tick * 3000 - (tick == 2), 100, [tick * 10 + number]) for tick in range(3) for number in range(9)
    ]
    requests = parse_trace("t", lines, seed=3).requests
    assert [request.prefix_ids[0] for request in requests] == [
        tick * 10 + number for tick in range(3) for number in range(9)
    ]
    assert [int(request.arrival_seconds // 3) for request in requests] == [0] * 9 + [1] * 9 + [2] * 9
    assert len({request.arrival_seconds for request in requests}) == 27
    assert parse_trace("t", lines, seed=3).requests == requests
    assert parse_trace("t", lines, seed=4).requests != requests


def test_a_request_that_extends_all_full_blocks_of_another_continues_its_session() -> None:
    lines = [
        line(1, 1100, [0, 1, 2]),
        line(2, 1700, [0, 1, 3, 4]),  # goes on where the first one's partial block was
        line(3, 1100, [0, 8, 9]),  # shares the first block only
        line(4, 1600, [0, 1, 3, 5]),  # the same conversation, three full blocks deep
    ]
    requests = parse_trace("t", lines, seed=0).requests
    assert [request.session for request in requests] == ["s0", "s0", "s2", "s0"]
    assert [request.user for request in requests] == ["s0", "s0", "s2", "s0"]


def test_a_session_that_the_trace_names_is_taken() -> None:
    lines = [line(1, 1100, [0, 1, 2], session="a"), line(2, 1700, [0, 1, 3, 4], session="b")]
    assert [request.session for request in parse_trace("t", lines, seed=0).requests] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "line 2 of the trace is not JSON"),
        ("[]", "line 2 of the trace is not an object"),
        (line(0, 513, [1]), "line 2 of the trace has 1 hash_ids; 513 tokens are 2 blocks of 512"),
        (line(0, 0, []), "line 2 of the trace has 0 hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}', "needs a whole number as output_length"),
        (line(0, 5, [1]).replace("0,", '"x",', 1), "needs a number as timestamp"),
        (line(0, 5, [1]).replace("[1]", '["a"]'), "needs a list of whole numbers as hash_ids"),
    ],
)
def test_a_line_that_cannot_be_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_trace("t", [line(0, 5, [1]), text], seed=0)


def test_images_are_read_and_tell_blocks_apart_from_where_they_begin() -> None:
    one, other, later = (
        {"hash": "one", "start": 600, "tokens": 900},
        {"hash": "other", "start": 600, "tokens": 900},
        {"hash": "one", "start": 601, "tokens": 900},
    )
    lines = [
        line(10 * number + 1, 2100, [1, 2, 3, 4, 5], **({"images": [image]} if image else {}))
        for number, image in enumerate([one, one, other, later, None])
    ]
    first, same, another, moved, text = parse_trace("t", lines, seed=0).requests
    assert first.images == (ImageSpan("one", 600, 900),)
    assert first.num_image_tokens == 900
    assert first.prefix_ids == same.prefix_ids
    assert text.prefix_ids == (1, 2, 3, 4, 5)
    for each in (another, moved, text):
        assert each.prefix_ids[0] == first.prefix_ids[0] == 1
        assert not set(each.prefix_ids[1:]) & set(first.prefix_ids[1:])
    assert [same.session, another.session] == [first.session, "s2"]
    assert max(first.prefix_ids) < 2**64


def test_what_comes_behind_an_image_differs_with_it_and_what_comes_before_does_not() -> None:
    images = [ImageSpan("a", 5, 10), ImageSpan("b", 33, 2)]
    both, first, second = (ids_with_images(range(6), each, 8) for each in (images, images[:1], images[1:]))
    assert both[:4] == first[:4] and not set(both[4:]) & set(first[4:])
    assert second[:4] == [0, 1, 2, 3] and not set(second[4:]) & {*both, *first, 4, 5}
    assert not set(both) & {0, 1, 2, 3, 4, 5}
    assert len(set(both)) == 6
    assert ids_with_images(range(6), [], 8) == [0, 1, 2, 3, 4, 5]
    in_one_block = ids_with_images(range(2), [ImageSpan("a", 1, 2), ImageSpan("b", 4, 2)], 8)
    assert in_one_block != ids_with_images(range(2), [ImageSpan("b", 1, 2), ImageSpan("a", 4, 2)], 8)


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        ("one", "needs a list as images"),
        (["one"], "has an image that is not an object"),
        ([{"hash": 7, "start": 0, "tokens": 3}], "has an image without a text as hash"),
        ([{"hash": "a", "start": True, "tokens": 3}], "has an image without a text as hash"),
        ([{"hash": "a", "start": 0}], "has an image without a text as hash"),
        ([{"hash": "a", "start": 0, "tokens": 0}], "has images that overlap, or do not lie in its prompt"),
        ([{"hash": "a", "start": 98, "tokens": 3}], "has images that overlap, or do not lie in its prompt"),
        ([{"hash": "a", "start": 5, "tokens": 9}] * 2, "has images that overlap, or do not lie"),
    ],
)
def test_images_that_cannot_be_are_told_with_their_line(images: object, sentence: str) -> None:
    lines = [line(1, 100, [1]), line(2, 100, [2], images=images)]
    with pytest.raises(ValueError, match=f"^line 2 of the trace {sentence}"):
        parse_trace("t", lines, seed=0)
