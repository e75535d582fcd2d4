"""Tables in a terminal."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which every column is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
