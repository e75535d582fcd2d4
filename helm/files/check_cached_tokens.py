"""`helm test`: checks that a second user's prompt finds a first user's beginning cached.

Owns the two prompts and the expected answers. Needs only Python and OpenAI's API. Arguments: the routers'
address, and the seconds to wait for them; KVASIR_API_KEY in the environment where routers ask for one.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

RULES = 40
"""Sentences in the common beginning: several hundred tokens."""


class Failed(Exception):
    """The cluster does not work as it should; the message says how."""


class Refused(Failed):
    """Waiting will not help."""


def main(arguments: list[str]) -> int:
    address, timeout_seconds = arguments[0].rstrip("/"), float(arguments[1])
    try:
        for model in wait_for_models(address, time.monotonic() + timeout_seconds):
            say(check(address, model))
    except Failed as failure:
        say(f"FAILED: {failure}")
        return 1
    return 0


def check(address: str, model: str) -> str:
    """Ask as one user, then as another, with the same long new beginning."""
    beginning = f"Manual {uuid.uuid4()}. " + " ".join(
        f"Rule {number}: answer question {number} politely and in one sentence." for number in range(RULES)
    )
    first = ask(address, model, beginning, user="helm-test-one", question="What is the first rule?")
    second = ask(address, model, beginning, user="helm-test-two", question="Which rule is the shortest?")
    cached, prompt = cached_tokens(second), second["prompt_tokens"]
    if cached * 2 < prompt:
        raise Failed(
            f"{model}: {cached} of the second user's {prompt} prompt tokens were cached, not most of them"
        )
    return (
        f"ok: {model}: {cached} of the second user's {prompt} prompt tokens were cached "
        f"(of the first user's {first['prompt_tokens']}: {cached_tokens(first)})"
    )


def ask(address: str, model: str, beginning: str, *, user: str, question: str) -> dict[str, Any]:
    """Return the usage of one short answer."""
    messages = [{"role": "system", "content": beginning}, {"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "user": user, "max_tokens": 4, "temperature": 0}
    answer = fetch(f"{address}/v1/chat/completions", json.dumps(body).encode())
    usage: dict[str, Any] = answer["usage"]
    return usage


def cached_tokens(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def wait_for_models(address: str, deadline: float) -> list[str]:
    """Return the names of all models, once there are any."""
    while True:
        try:
            names = [model["id"] for model in fetch(f"{address}/v1/models", None)["data"]]
            reason = "no model is served"
        except Refused:
            raise
        except Failed as failure:
            names, reason = [], str(failure)
        if names:
            return names
        if time.monotonic() > deadline:
            raise Failed(reason)
        time.sleep(1)


def fetch(url: str, body: bytes | None) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("KVASIR_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise Refused(f"{url} asks for an API key: set test.apiKeySecret to a Secret with one") from error
        raise Failed(f"{url} answers {error.code}: {error.read(1000).decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise Failed(f"{url} does not answer: {error}") from error


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
