"""Paging: how long a page of a list may be.

Owns the bounds.
"""

from router.errors import InvalidRequest

DEFAULT_PAGE = 20
MAX_PAGE = 100


def page_limit(text: str | None) -> int:
    """Parse the `limit` of a list. Raises InvalidRequest."""
    if text is None:
        return DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= MAX_PAGE):
        raise InvalidRequest(
            f"Invalid value for 'limit': '{text[:20]}' is no number from 1 to {MAX_PAGE}.", parameter="limit"
        )
    return int(text)
