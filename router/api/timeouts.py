"""How long a client wants to wait for its answer to begin: a field of the body, or a header on any dialect.

Owns the header; the field is one of `sampling.py`'s.
"""

from collections.abc import Iterable
from dataclasses import replace

from starlette.types import Scope

from router.api.api_request import Prompt
from router.api.json_body import check_timeout, invalid

TIMEOUT = b"x-kvasir-timeout"


def timeout_of(scope: Scope) -> float | None:
    """Parse the header. Raises InvalidRequest for anything but a number of seconds."""
    for name, value in scope["headers"]:
        if name == TIMEOUT:
            parameter = TIMEOUT.decode()
            try:
                seconds = float(value.decode("ascii"))
            except ValueError:
                raise invalid(parameter, "it is a number of seconds.") from None
            check_timeout(seconds, parameter)
            return seconds
    return None


def set_timeout(prompts: Iterable[Prompt], seconds: float | None) -> None:
    """The shorter one holds, where the body has one too."""
    if seconds is None:
        return
    for prompt in prompts:
        own = prompt.generation.timeout_seconds
        shortest = seconds if own is None else min(own, seconds)
        prompt.generation = replace(prompt.generation, timeout_seconds=shortest)
