"""The server of a load test, and what it says of itself.

Owns the questions before a run. Any server with OpenAI's API will do; missing facts are None.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtests.workloads import PageSize
from loadtests.workloads.pages import PAGE_SIZES, Pages

TIMEOUT_SECONDS = 10.0
MOST_ANSWER_BYTES = 1 << 20


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


def page_tokens(target: Target, api_key: str) -> dict[str, int] | None:
    """Ask /tokenize for the tokens of a page of each kind; None if it is not served.

    Raises TargetError if the model does not take images.
    """
    try:
        num_of_text = _count(target, api_key, "")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found: dict[str, int] = {}
    for name, size in PAGE_SIZES.items():
        try:
            found[name] = max(1, _count(target, api_key, name, size) - num_of_text)
        except urllib.error.HTTPError as error:
            raise TargetError(
                f"{target.base_url} takes no images for the model {target.model}, which this workload sends:"
                f" {_said(error)}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TargetError(f"{target.base_url}/tokenize: {error}") from error
    return found


def _count(target: Target, api_key: str, name: str, size: PageSize | None = None) -> int:
    content: list[dict[str, object]] = [{"type": "text", "text": "What is this?"}]
    if size is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": Pages(0).url(name, size)}})
    body = {"model": target.model, "messages": [{"role": "user", "content": content}]}
    return int(_get(f"{target.base_url}/tokenize", api_key, body)["count"])


def _said(error: urllib.error.HTTPError) -> str:
    """Return the server's own sentence, if it has one."""
    try:
        return str(json.loads(error.read(MOST_ANSWER_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error)


def _num_replicas(root: str, model: str, api_key: str) -> int | None:
    try:
        number = _get(f"{root}/ready", api_key)["models"][model]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None


def _get(url: str, api_key: str, body: Mapping[str, object] | None = None) -> Any:
    """With a body it is a POST."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data, headers)
    with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
        return json.loads(response.read(MOST_ANSWER_BYTES))
