"""The server that a load test talks to: what it serves, as far as it says so.

Owns the questions before a run. Any server that speaks OpenAI's API will do; what one leaves out is None.
"""

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 10.0


class TargetError(Exception):
    """One sentence for the user who typed the address."""


@dataclass(frozen=True, slots=True)
class Target:
    base_url: str
    model: str
    context_length: int | None
    num_replicas: int | None


def find_target(base_url: str, model: str | None, api_key: str) -> Target:
    """Raises TargetError."""
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        served = _get(f"{root}/v1/models", api_key)["data"]
        known = {each["id"]: each for each in served}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{root}/v1/models: {error}") from error
    model = next(iter(known), None) if model is None else model
    if model is None or model not in known:
        raise TargetError(f"{root} serves no model {model or ''}; there are: {', '.join(known) or 'none'}")
    length = known[model].get("max_model_len")
    return Target(
        root, model, length if isinstance(length, int) else None, _num_replicas(root, model, api_key)
    )


def _num_replicas(root: str, model: str, api_key: str) -> int | None:
    try:
        number = _get(f"{root}/ready", api_key)["models"][model]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None


def _get(url: str, api_key: str) -> Any:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as response:
        return json.loads(response.read())
