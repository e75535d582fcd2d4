"""Formats tables and numbers for a terminal."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad every column to its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def size(num_bytes: int) -> str:
    """Format bytes in the largest binary unit that fits."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    value = num_bytes / 1024**power
    digits = 1 if power and value < 10 else 0
    return f"{value:.{digits}f} {units[power]}"
