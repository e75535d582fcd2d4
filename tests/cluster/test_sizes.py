import argparse

import pytest

from cluster.sizes import in_words, size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("1B", 1), ("2kB", 2000), ("2KiB", 2048), ("1.5GiB", 3 * 2**29), ("256GB", 256 * 10**9)],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1gb", "nan", "infB", "0"])
def test_what_is_no_size_gets_a_sentence(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="needs a size such as 256GB or 512MiB, not"):
        size(text)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**28, "256 MiB"),
        (3 * 2**29, "1.5 GiB"),
    ],
)
def test_a_size_is_said_in_its_largest_unit(num_bytes: int, words: str) -> None:
    assert in_words(num_bytes) == words
