"""Paging: pages of a list, and how long one may be.

Owns the bounds.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from msgspec import Struct

from router.api.json_body import invalid

DEFAULT_PAGE = 20
MAX_PAGE = 100


class Page(Struct, kw_only=True):
    """`data` are objects with an `id`."""

    object: Literal["list"] = "list"
    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


AnyPage = TypeVar("AnyPage", bound=Page)


def new_page(kind: type[AnyPage], data: Sequence[Any], ids: Sequence[str], has_more: bool) -> AnyPage:
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return kind(data=data, first_id=first, last_id=last, has_more=has_more)


def page_limit(text: str | None) -> int:
    """Parse the `limit` of a list. Raises InvalidRequest."""
    if text is None:
        return DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= MAX_PAGE):
        raise invalid("limit", f"'{text[:20]}' is no number from 1 to {MAX_PAGE}.")
    return int(text)
