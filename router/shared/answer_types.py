"""Types of fields that many answers have.

An answer is a Struct that is encoded as it stands, and the OpenAPI document is made from it. A field with a
constant has it as its default; a field that may be missing is UNSET.
"""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]


class TierTokens(Struct):
    """Tokens read from cache, by the tier that had them."""

    device: Count
    host: Count
    disk: Count
