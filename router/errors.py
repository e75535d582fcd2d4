"""Everything that can go wrong with a request, as the router's own code sees it.

    RouterError
    ├── InvalidRequest            the client's request is wrong: message, parameter, code
    │   └── ContextLengthExceeded
    ├── UnknownModel              no replica serves that model
    ├── CacheGone                 there is no such named cache: why, since when
    ├── CachesFull                there are as many named caches as there may be
    ├── CachesUnavailable         named caches cannot be reached now; try again
    ├── ResponseGone              there is no such stored response
    ├── ResponsesUnavailable      stored responses cannot be reached now; try again
    ├── BodyTooLarge
    ├── BodiesFull                all bodies that are read take too much memory; try again
    ├── UploadTooSlow             the body did not arrive in time
    ├── Overloaded                full queues; try again after `retry_after_seconds`
    ├── RouterBusy                the router itself has as much to do as it can; as Overloaded
    ├── NoReplicaAvailable        the model is known, but no replica is ready at the moment
    └── GenerationFailed          a replica died or failed, and retrying did not help

HTTP status codes stand in `app.py` and `api/`, nowhere here.
"""

import contextlib
import enum
from collections.abc import Iterator
from typing import ClassVar, NamedTuple


class ErrorKind(enum.StrEnum):
    """Why a request did not get its whole answer, for those who count."""

    INVALID = "invalid"
    CONTEXT_LENGTH = "context_length"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    METHOD = "method"
    OVERLOADED = "overloaded"
    NO_REPLICA = "no_replica"
    FAILED = "failed"
    CLIENT_GONE = "client_gone"
    CUT_OFF = "cut_off"
    """The router was stopped meanwhile."""
    INTERNAL = "internal"


class HeadFault(enum.StrEnum):
    """What in its head had a request refused before its body was read, for those who count."""

    HOST = "host"
    ORIGIN = "origin"
    CONTENT_TYPE = "content_type"
    CONTENT_ENCODING = "content_encoding"


class RouterError(Exception):
    """Base of the tree. `message` is fit for the client."""

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL
    model: str | None = None
    """Which model the request asked for, where that is known; it need not be one that is served."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@contextlib.contextmanager
def about_model(name: str) -> Iterator[None]:
    """What goes wrong inside was asked of this model."""
    try:
        yield
    except RouterError as error:
        error.model = name
        raise


class InvalidRequest(RouterError):
    """`parameter` is the field's path in the request body (`messages[2].content`), `code` a stable word."""

    kind = ErrorKind.INVALID

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class Excess(NamedTuple):
    """How many tokens there are, at least, and how many the context holds."""

    num_tokens: int
    context_length: int


class ContextLengthExceeded(InvalidRequest):
    kind = ErrorKind.CONTEXT_LENGTH

    def __init__(self, message: str, *, parameter: str | None = None, excess: Excess | None = None) -> None:
        super().__init__(message, parameter=parameter, code="context_length_exceeded")
        self.excess = excess


class UnknownModel(RouterError):
    kind = ErrorKind.UNKNOWN_MODEL


class CacheGone(RouterError):
    """`code` is a stable word for why, `parameter` the field that named it."""

    kind = ErrorKind.INVALID

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        self.parameter = "cache"


class CachesFull(RouterError):
    kind = ErrorKind.OVERLOADED
    retry_after_seconds = 60.0


class CachesUnavailable(RouterError):
    kind = ErrorKind.OVERLOADED
    retry_after_seconds = 2.0


class ResponseGone(RouterError):
    kind = ErrorKind.INVALID


class ResponsesUnavailable(RouterError):
    kind = ErrorKind.OVERLOADED
    retry_after_seconds = 2.0


class BodyTooLarge(RouterError):
    kind = ErrorKind.TOO_LARGE


class BodiesFull(RouterError):
    kind = ErrorKind.OVERLOADED
    retry_after_seconds = 1.0


class UploadTooSlow(RouterError):
    kind = ErrorKind.TOO_SLOW


class Overloaded(RouterError):
    kind = ErrorKind.OVERLOADED

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RouterBusy(RouterError):
    """Not for want of replicas, and not by this client's doing."""

    kind = ErrorKind.OVERLOADED

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoReplicaAvailable(RouterError):
    kind = ErrorKind.NO_REPLICA

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class GenerationFailed(RouterError):
    kind = ErrorKind.FAILED
