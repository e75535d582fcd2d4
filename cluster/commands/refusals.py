"""refused(): the error of a command whose question a router has refused, and what to do about it."""

import httpx

from cluster.errors import ClusterError

KEY_VARIABLE = "KVASIR_API_KEY"
KEY_HINT = f"set {KEY_VARIABLE} to an API key, or give --api-key"


def refused(what: str, answer: httpx.Response, hint: str | None = None) -> ClusterError:
    """`what` begins the sentence; `hint` says what may help. For a 401 that is known."""
    said = f"{what}: {_message(answer)}"
    if answer.status_code == 401:
        hint = KEY_HINT
    return ClusterError(said if hint is None else f"{said.rstrip('.')}; {hint}")


def _message(answer: httpx.Response) -> str:
    """What the router says of an error."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
