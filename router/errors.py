"""Everything that can go wrong with a request, as the router's own code sees it.

    RouterError
    ├── InvalidRequest            the client's request is wrong: message, parameter, code
    │   └── ContextLengthExceeded
    ├── UnknownModel              no replica serves that model
    ├── BodyTooLarge
    ├── UploadTooSlow             the body did not arrive in time
    ├── Overloaded                full queues; try again after `retry_after_seconds`
    ├── NoReplicaAvailable        the model is known, but no replica is ready just now
    └── GenerationFailed          a replica died or failed, and retrying did not help

HTTP status codes stand in `app.py` and `api/`, nowhere here.
"""


class RouterError(Exception):
    """Base of the tree. `message` is fit for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(RouterError):
    """`parameter` is the field's path in the request body (`messages[2].content`), `code` a stable word."""

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message, parameter=parameter, code="context_length_exceeded")


class UnknownModel(RouterError):
    pass


class BodyTooLarge(RouterError):
    pass


class UploadTooSlow(RouterError):
    pass


class Overloaded(RouterError):
    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoReplicaAvailable(RouterError):
    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class GenerationFailed(RouterError):
    pass
