"""How much work a body can be, told from its bytes before anything is made of them.

Owns the bounds of what is prepared on the event loop; whatever is beyond goes to a process of its own
(`router/large_bodies/`). Bounds are on bytes and on JSON values: eight MiB of one string are a few
milliseconds' work, eight MiB of nested lists are seconds. And on powers of ten: msgspec takes 40 µs to read
1e300.
"""

TINY_BYTES = 2**10
"""Too few for anything to take long."""

SMALL_BYTES = 8 * 2**10
"""A body of so few bytes cannot hold more values than a light one may."""

MOST_BYTES = 256 * 2**10

MOST_VALUES = 4096
"""Each may be decoded, checked, walked through, converted for the template and written out: 5 µs in all."""


MOST_EXPONENTS = 256
"""Numbers such as 1e300, and what looks like them in texts."""

_OUTLINE = bytes.maketrans(b"123456789+E", b"0000000000e")


def is_light(body: bytes) -> bool:
    """Whatever is done with it."""
    return len(body) <= TINY_BYTES or (len(body) <= SMALL_BYTES and _has_few_exponents(body))


def is_light_chat(body: bytes) -> bool:
    if len(body) <= TINY_BYTES:
        return True
    if len(body) > MOST_BYTES or not _has_few_exponents(body):
        return False
    return len(body) <= SMALL_BYTES or _has_few_values(body)


def is_light_completion(body: bytes) -> bool:
    """Token ids are many and cheap: only what nests is counted."""
    if len(body) <= TINY_BYTES:
        return True
    if len(body) > MOST_BYTES or not _has_few_exponents(body):
        return False
    return len(body) <= SMALL_BYTES or body.count(b"[") + body.count(b"{") <= MOST_VALUES


def _has_few_exponents(body: bytes) -> bool:
    return body.translate(_OUTLINE).count(b"0e00") <= MOST_EXPONENTS


def _has_few_values(body: bytes) -> bool:
    if _num_values(body) <= MOST_VALUES:  # with what stands in strings
        return True
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return (
        unescaped.count(b'"') <= 2 * MOST_VALUES
        and _num_values(b"".join(unescaped.split(b'"')[::2])) <= MOST_VALUES
    )


def _num_values(text: bytes) -> int:
    """Return an upper bound on the number of JSON values: each but the first follows a comma or an opening
    bracket."""
    return text.count(b",") + text.count(b"[") + text.count(b"{") + 1
