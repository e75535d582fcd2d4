from replicas.media.encoding import Encoding
from replicas.protocol.blocks import ImageTokens

FIRST, SECOND = ImageTokens(b"a" * 32, 10, 20), ImageTokens(b"b" * 32, 40, 5)


def test_an_image_is_encoded_whole_for_the_first_of_its_tokens_and_once() -> None:
    encoding = Encoding([FIRST, SECOND])
    assert [encoding.encode(start, start + 8) for start in range(0, 48, 8)] == [0, 20, 0, 0, 0, 5]
    assert encoding.num_tokens_left == 0
    assert encoding.encode(0, 48) == 0  # preempted, and computed again


def test_an_image_that_is_cached_whole_is_not_encoded_and_one_that_is_not_is() -> None:
    assert Encoding([FIRST, SECOND]).encode(30, 48) == 5
    assert Encoding([FIRST, SECOND]).encode(29, 48) == 25
    assert Encoding([FIRST, SECOND]).encode(45, 48) == 0


def test_what_is_expected_to_be_cached_is_not_left_until_the_computing_tells() -> None:
    encoding = Encoding([FIRST, SECOND])
    assert encoding.num_tokens_left == 25
    encoding.expect(32)
    assert encoding.num_tokens_left == 5
    assert encoding.encode(16, 20) == 20  # less was cached than expected
    encoding.expect(48)
    assert encoding.num_tokens_left == 5
