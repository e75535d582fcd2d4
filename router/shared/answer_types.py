"""Types of fields that many answers have.

An answer is a Struct that is encoded as it stands, and the OpenAPI document is made from it. A field with a
constant has it as its default; a field that may be missing is UNSET.
"""

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
