"""StoredResponse: one response with its input, and ResponseBounds: how many there may be, and how large.

Plain data.
"""

import re
from dataclasses import dataclass

from msgspec import Struct

ID_PREFIX = "resp_"
_ID = re.compile(r"resp_[0-9a-f]{24}")
SHARE_OF_ONE = 64
"""One response may take 1/64 of the bytes of all."""


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """`num_responses` and `num_bytes` are for each tenant, over all routers; `memory_bytes` is for each
    router, and counts questions that are still being answered."""

    num_responses: int = 4096
    num_bytes: int = 64 * 2**20
    memory_bytes: int = 64 * 2**20
    seconds: float = 86_400.0

    @property
    def bytes_per_response(self) -> int:
        return min(self.num_bytes, self.memory_bytes) // SHARE_OF_ONE


class StoredResponse(Struct, frozen=True):
    """`created` is in seconds since 1970. `items` is the input with all items before it, a list in JSON;
    `response` is the answer as its client got it."""

    response_id: str
    tenant: str
    created: float
    items: bytes
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.response)


def is_response_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None
