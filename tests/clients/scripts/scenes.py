"""Scenes: what a client library does with a cluster, one function each, and what it saw of the answer.

The scripts beside this file run in environments of their own, with the library and without the project. Each
ends with a line of JSON, of the scenes' names and what they returned or raised, which the tests judge.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else ""
"""The router's, without a path."""
MODEL = "talking"

Scene = Callable[[], Any]
_scenes: dict[str, Scene] = {}


def scene(function: Scene) -> Scene:
    _scenes[function.__name__] = function
    return function


def act() -> None:
    seen: dict[str, Any] = {}
    for name, function in _scenes.items():
        try:
            seen[name] = function()
        except Exception as error:
            lines = traceback.format_exception(error)
            seen[name] = {"raised": type(error).__name__, "trace": "".join(lines)[-3000:]}
    sys.stdout.write(f"\n{json.dumps(seen, default=str)}\n")


def raised(call: Scene) -> dict[str, Any]:
    """How the library reports that it was refused."""
    try:
        answer = call()
    except Exception as error:
        told = ("status_code", "code", "type", "param", "request_id", "message", "body")
        return {"name": type(error).__name__, **{name: getattr(error, name, None) for name in told}}
    raise AssertionError(f"nothing was raised, and it answered {answer!r}")
