"""Hooks of features into a request: when they are called, and that a feature without any is not."""

from collections.abc import Iterable

import httpx

from router.api.api_request import ApiRequest, Prompt
from router.edge.http import Header
from router.errors import NoReplicaAvailable
from router.feature import Feature, Hooks
from router.served import ServedRequest
from tests.router.http_server import http_server
from tests.router.scripted_dispatch import says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


class Noted(Feature):
    """Notes the stages that a request goes through."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        request.state[self] = body
        self.stages.append(f"prepared {request.path}")

    def started(self, request: ApiRequest, prompt: Prompt) -> None:
        assert prompt.usage is not None and request.prepared_at >= request.arrived_at > 0
        self.stages.append("started")

    def headers(self, request: ApiRequest) -> Iterable[Header]:
        self.stages.append("headers")
        return [(b"x-noted", b"%d" % len(request.state[self]))]

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
        begin, end = ["prepared /v1/chat/completions", "started"], "ended 200"
        assert noted.stages == [*begin, "answered", "headers", end]
        noted.stages.clear()
        await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert noted.stages == [*begin, "headers", "answered", end]


async def test_a_request_that_fails_is_not_answered_and_one_that_was_never_prepared_is_not_told_of() -> None:
    async with http_server() as server, httpx.AsyncClient(base_url=server.url) as http:
        noted = Noted()
        server.context.add(noted)
        server.dispatcher.script = lambda generation: [NoReplicaAvailable("none")]
        await http.post("/v1/chat/completions", json=CHAT)
        assert noted.stages == ["prepared /v1/chat/completions", "ended 503"]
        noted.stages.clear()
        assert (await http.post("/v1/chat/completions", json={})).status_code == 400
        assert noted.stages == []


def test_a_hook_that_a_feature_does_not_override_is_not_called() -> None:
    hooks = Hooks()
    hooks.add(Feature())
    assert not any(vars(hooks).values())
