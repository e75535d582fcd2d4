"""How many examples Hypothesis tries: the full number in CI, a quarter of it on the way there."""

import os

FULL = bool(os.environ.get("CI"))


def examples(number: int) -> int:
    """`number` in CI, and few enough elsewhere that a test of them takes a second or two."""
    return number if FULL else max(number // 4, 10)
