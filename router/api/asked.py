"""Asked: a request once its body has been read. Prepare: turns it into an ApiRequest that can run.

Plain data.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Scope

from router.api.api_request import ApiRequest
from router.api.context import ApiContext
from router.caller import Caller, caller_of


@dataclass(frozen=True, slots=True)
class Asked:
    """`address` is the client's."""

    body: bytes
    address: str | None
    scope: Scope

    @property
    def caller(self) -> Caller:
        return caller_of(self.scope)

    @property
    def share_owner(self) -> str:
        """The owner of its share of what requests take in turns: the tenant, or the address without keys."""
        return self.caller.owner or self.address or ""


Prepare = Callable[[ApiContext, Asked], Awaitable[ApiRequest]]
"""Raises a RouterError."""
