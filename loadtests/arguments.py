"""Argparse types for options that several commands share.

Owns the sentences for invalid values.
"""

import argparse
import math

from cluster.sizes import size


def number(text: str) -> float:
    """Any finite one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"needs a number, not {text}")
    return value


def positive(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"needs a number above 0, not {text}")
    return value


def share(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"needs a share from 0 to below 1, not {text}")
    return value


def seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number from 0, not {text}")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number above 0, not {text}")
    return int(text)


def rate(text: str) -> int:
    """Bytes per second, as 10GB/s."""
    if not text.endswith("/s"):
        raise argparse.ArgumentTypeError(f"needs a rate such as 10GB/s, not {text}")
    return size(text.removesuffix("/s"))
