"""How many examples Hypothesis tries: the full number with `./kvasir test --all`, a quarter of it without."""

import os

FULL = os.environ.get("KVASIR_EXAMPLES") == "full"


def examples(number: int) -> int:
    """`number` with --all, and few enough without that a test of them takes a second or two."""
    return number if FULL else max(number // 4, 10)
