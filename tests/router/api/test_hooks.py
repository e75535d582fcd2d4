"""Hooks of features into a request: when they are called, and that a feature without any is not."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import httpx

from router.api.api_request import ApiRequest, Prompt
from router.edge.http import Header
from router.errors import InvalidRequest, NoReplicaAvailable
from router.feature import Feature, Hooks
from router.served import ServedRequest
from tests.router.http_server import http_server
from tests.router.scripted_dispatch import says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


class Noted(Feature):
    """Notes the stages that a request goes through."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def arrived(self, request: ApiRequest) -> None:
        assert not request.prompts and not request.body
        self.stages.append(f"arrived {request.path}")

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        self.stages.append("admitted")
        yield
        self.stages.append("left")

    def admitted(self, request: ApiRequest) -> AbstractContextManager[None]:
        return self._held()

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        request.state[self] = body
        self.stages.append("prepared")

    def started(self, request: ApiRequest, prompt: Prompt) -> None:
        assert prompt.usage is not None and request.prepared_at >= request.arrived_at > 0
        self.stages.append("started")

    def headers(self, request: ApiRequest) -> Iterable[Header]:
        self.stages.append("headers")
        return [(b"x-noted", b"%d" % len(request.state.get(self, b"")))]

    def answered(self, request: ApiRequest) -> None:
        self.stages.append("answered")

    def ended(self, request: ApiRequest, served: ServedRequest) -> None:
        self.stages.append(f"ended {served.status}")


async def test_hooks_follow_a_request_from_its_body_to_its_end() -> None:
    async with http_server() as server, httpx.AsyncClient(base_url=server.url) as http:
        noted = Noted()
        server.context.add(noted)
        server.dispatcher.script = says([1, 2])
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert answer.headers["x-noted"] == answer.request.headers["content-length"]
        begin = ["arrived /v1/chat/completions", "prepared", "admitted", "started"]
        assert noted.stages == [*begin, "left", "answered", "headers", "ended 200"]
        noted.stages.clear()
        await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert noted.stages == [*begin, "headers", "left", "answered", "ended 200"]


async def test_a_request_that_fails_is_not_answered() -> None:
    async with http_server() as server, httpx.AsyncClient(base_url=server.url) as http:
        noted = Noted()
        server.context.add(noted)
        arrived = "arrived /v1/chat/completions"
        server.dispatcher.script = lambda generation: [NoReplicaAvailable("none")]
        await http.post("/v1/chat/completions", json=CHAT)
        assert noted.stages == [arrived, "prepared", "admitted", "headers", "ended 503"]
        noted.stages.clear()
        assert (await http.post("/v1/chat/completions", json={})).headers["x-noted"] == "0"
        assert noted.stages == [arrived, "headers", "ended 400"]


async def test_a_hook_may_refuse_a_request_before_its_body_is_read() -> None:
    class Refusing(Feature):
        def arrived(self, request: ApiRequest) -> None:
            raise InvalidRequest("No.")

    async with http_server() as server, httpx.AsyncClient(base_url=server.url) as http:
        server.context.add(Refusing())
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "No.")


def test_a_hook_that_a_feature_does_not_override_is_not_called() -> None:
    hooks = Hooks()
    hooks.add(Feature())
    assert not any(vars(hooks).values())
