"""refused(): the error for a request that a router refused, with a hint."""

import httpx

from cluster.errors import ClusterError

KEY_VARIABLE = "KVASIR_API_KEY"
KEY_HINT = f"set {KEY_VARIABLE} to an API key, or give --api-key"


def refused(what: str, answer: httpx.Response, hint: str | None = None) -> ClusterError:
    """Build the error. `what` begins the sentence, `hint` says what may help; a 401 has a hint of its own."""
    said = f"{what}: {_message(answer)}"
    if answer.status_code == 401:
        hint = KEY_HINT
    return ClusterError(said if hint is None else f"{said.rstrip('.')}; {hint}")


def _message(answer: httpx.Response) -> str:
    """Extract the router's error message."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
