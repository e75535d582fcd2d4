"""Tables in a terminal, and numbers in them."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which every column is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def size(num_bytes: int) -> str:
    """In the largest binary unit of which it has one."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    value = num_bytes / 1024**power
    digits = 1 if power and value < 10 else 0
    return f"{value:.{digits}f} {units[power]}"
