"""SamplingDefaults: a model's own word on how to sample where a request has none.

Owns the parameters, under their names in `generation_config.json`, and the bounds of their values, which are
those of clients' requests.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated

import msgspec
from msgspec import Meta

from replicas.protocol.bounds import Uint32, shown

_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """None leaves a parameter open: neutral at our engines, the server's own default at a server."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Uint32 | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    def given(self) -> Mapping[str, float]:
        """Return those that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NAMES = tuple(field.name for field in fields(SamplingDefaults))
PARAMETERS = tuple(name for name in NAMES if name != "max_new_tokens")
"""The names that shape the distribution; SamplingParams has the same."""

NEUTRAL = SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0)


def checked_default(name: str, value: object) -> float:
    """Return the value of one of NAMES. Raises ValueError with a sentence for the user."""
    try:
        kept = 0 if name == "top_k" and value == -1 else value
        number: float = getattr(msgspec.convert({name: kept}, SamplingDefaults), name)
    except msgspec.ValidationError as error:
        reason = str(error).removesuffix(f" - at `$.{name}`").replace(" | null", "")
        raise ValueError(f"{name} cannot be {shown(value)}: {reason}") from error
    return number
