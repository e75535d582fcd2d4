"""Parses and formats sizes in bytes with a unit.

Units without `i` are powers of 1,000, units with it powers of 1,024.
"""

import argparse
import math

_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)},
}


def size(text: str) -> int:
    """Parse bytes, as in 256GB or 512MiB."""
    digits = text.rstrip("BkKMGTi")
    unit = _UNITS.get(text[len(digits) :] or "B")
    try:
        value = float(digits)
    except ValueError:
        value = math.nan
    if unit is None or not (math.isfinite(value) and value * unit >= 1):
        raise argparse.ArgumentTypeError(f"needs a size such as 256GB or 512MiB, not {text}")
    return int(value * unit)


def in_words(num_bytes: int) -> str:
    """Format bytes in the largest unit of 1,024 that gives at least one: 256 MiB, 1.5 GiB."""
    unit, factor = "B", 1
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes >= _UNITS[name]:
            unit, factor = name, _UNITS[name]
    return f"{num_bytes / factor:.4g} {unit}"
