"""Everything that can go wrong with a request, as the router's own code sees it.

    RouterError
    ├── InvalidRequest            the client's request is wrong: message, parameter, code
    │   └── ContextLengthExceeded
    ├── UnknownModel              no replica serves that model
    ├── CacheGone                 there is no such named cache: why, since when
    ├── CachesFull                there are as many named caches as there may be
    ├── CachesUnavailable         named caches cannot be reached now; try again
    ├── NotAllowed                the key that asks lacks a right
    ├── PrefixGone                there is no such published prefix
    ├── ResponseGone              there is no such stored response
    ├── ExplanationGone           nothing is known of such a request
    ├── ResponsesUnavailable      stored responses cannot be reached now; try again
    ├── UsageUnavailable          what was used cannot be read now; try again
    ├── BodyTooLarge
    ├── BodiesFull                all bodies that are read take too much memory; try again
    ├── UploadTooSlow             the body did not arrive in time
    ├── Overloaded                full queues; try again after `retry_after_seconds`
    ├── RouterBusy                the router itself has as much to do as it can; as Overloaded
    ├── LimitReached              the caller's own limits; whether and when it fits
    ├── TooLate                   it was or would be not served in time; as Overloaded
    ├── NoReplicaAvailable        the model is known, but no replica is ready at the moment
    ├── GenerationFailed          a replica died or failed, and retrying did not help
    └── ServerRefused             the server beside a replica says why, in its own words

HTTP status codes stand in `app.py` and `api/`, nowhere here.
"""

import enum
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

from replicas.protocol.bounds import few
from replicas.protocol.frames import ServerError


class ErrorKind(enum.StrEnum):
    """Reason why a request did not get its whole answer, for metrics."""

    INVALID = "invalid"
    CONTEXT_LENGTH = "context_length"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    METHOD = "method"
    OVERLOADED = "overloaded"
    LIMITED = "limited"
    """A limit of its tenant or its key."""
    TOO_LATE = "too_late"
    """It could not have been served in time."""
    NO_REPLICA = "no_replica"
    FAILED = "failed"
    CLIENT_GONE = "client_gone"
    CUT_OFF = "cut_off"
    """The router was stopped meanwhile."""
    INTERNAL = "internal"


class HeadFault(enum.StrEnum):
    """Reason for refusing a request by its head, for metrics."""

    HOST = "host"
    REPEATED = "repeated"
    """A header that identifies the caller or the target came twice."""
    ORIGIN = "origin"
    CONTENT_TYPE = "content_type"
    CONTENT_ENCODING = "content_encoding"


class KeyFault(enum.StrEnum):
    """Reason why a request's credentials are refused, for metrics."""

    MISSING = "key_missing"
    UNKNOWN = "key_unknown"
    EXPIRED = "key_expired"
    WRONG_HEADER = "key_in_wrong_header"
    NOT_ALLOWED = "not_allowed"
    """The key is right, and does not allow this."""


class RouterError(Exception):
    """Base of the tree. `message` is fit for the client."""

    kind: ErrorKind = ErrorKind.INTERNAL
    model: str | None = None
    """The requested model, if known; it need not be a served one."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class AboutModel:
    """Adds this model to errors inside. Every request passes several of these."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RouterError):
            error.model = self._name


about_model = AboutModel


class InvalidRequest(RouterError):
    """`parameter` is the field's path in the request body (`messages[2].content`), `code` a stable word."""

    kind = ErrorKind.INVALID

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class Excess(NamedTuple):
    """Least number of tokens, and the context's size."""

    num_tokens: int
    context_length: int


class ContextLengthExceeded(InvalidRequest):
    kind = ErrorKind.CONTEXT_LENGTH

    def __init__(self, message: str, *, parameter: str | None = None, excess: Excess | None = None) -> None:
        super().__init__(message, parameter=parameter, code="context_length_exceeded")
        self.excess = excess


class UnknownModel(RouterError):
    kind = ErrorKind.UNKNOWN_MODEL


def unknown_model(name: str, served: Iterable[str]) -> UnknownModel:
    return UnknownModel(
        f"The model '{name[:200]}' does not exist or is not served here. Served here: {few(served)}."
    )


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


class NotAllowed(RouterError):
    kind = ErrorKind.INVALID


class PrefixGone(RouterError):
    kind = ErrorKind.INVALID


class ResponseGone(RouterError):
    kind = ErrorKind.INVALID


class ExplanationGone(RouterError):
    kind = ErrorKind.INVALID


class ResponsesUnavailable(RouterError):
    kind = ErrorKind.OVERLOADED
    retry_after_seconds = 2.0


class UsageUnavailable(RouterError):
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


class LimitReached(RouterError):
    """`what` is a stable word: requests, tokens or sequences. Without `retry_after_seconds` waiting does not
    help."""

    kind = ErrorKind.LIMITED

    def __init__(self, message: str, *, what: str, retry_after_seconds: float | None) -> None:
        super().__init__(message)
        self.what = what
        self.retry_after_seconds = retry_after_seconds


class TooLate(RouterError):
    """The request's deadline, or its tenant's, has passed or would have passed before its first token."""

    kind = ErrorKind.TOO_LATE

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


class ServerRefused(RouterError):
    """`kind` says whether to ask again may help."""

    def __init__(
        self, message: str, kind: ErrorKind, error: ServerError, *, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.error = error
        self.retry_after_seconds = retry_after_seconds
