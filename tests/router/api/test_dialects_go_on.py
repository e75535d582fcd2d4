"""By every dialect a conversation goes on from its own tokens: ten turns with reasoning and tool calls, each
sent back as the dialect's clients send it."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Protocol

import httpx
import pytest

from router.features.history.feature import HistoryOutcome
from router.features.responses.record import ResponseBounds
from router.features.responses.store import ResponseStore
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says
from tests.router.thinking_model import MODEL, catalog, token_ids

NUM_TURNS = 10
CALLS = (
    'Let me see.\n\n\n<tool_call>\n{"name":"weather",  "arguments": {"days":2, "city": "Århus"}}</tool_call>'
    '<tool_call>{"arguments": {}, "name": "time"}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("weather", "time")


class Client(Protocol):
    """A conversation by one dialect. Each of them says something, and takes what was answered to heart."""

    async def ask(self, http: httpx.AsyncClient, question: str) -> None: ...
    async def tell_results(self, http: httpx.AsyncClient) -> None: ...


async def posted(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


class ChatClient:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    async def ask(self, http: httpx.AsyncClient, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        await self._send(http)

    async def tell_results(self, http: httpx.AsyncClient) -> None:
        self._messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "12"}
            for call in self._messages[-1]["tool_calls"]
        ]
        await self._send(http)

    async def _send(self, http: httpx.AsyncClient) -> None:
        functions = [{"name": name, "parameters": SCHEMA} for name in NAMES]
        tools = [{"type": "function", "function": function} for function in functions]
        body = {"model": MODEL, "messages": self._messages, "tools": tools}
        answer = await posted(http, "/v1/chat/completions", body)
        self._messages.append(answer["choices"][0]["message"])


class MessagesClient:
    def __init__(self, *, echoes_thinking: bool) -> None:
        self._messages: list[dict[str, Any]] = []
        self._echoes_thinking = echoes_thinking

    async def ask(self, http: httpx.AsyncClient, question: str) -> None:
        await self._send(http, [{"type": "text", "text": question}])

    async def tell_results(self, http: httpx.AsyncClient) -> None:
        uses = [block for block in self._messages[-1]["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "12"} for use in uses]
        await self._send(http, results)

    async def _send(self, http: httpx.AsyncClient, content: list[dict[str, Any]]) -> None:
        self._messages.append({"role": "user", "content": content})
        body = {
            "model": MODEL,
            "max_tokens": 2048,
            "messages": self._messages,
            "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        answer = await posted(http, "/v1/messages", body)
        content = answer["content"]
        if not self._echoes_thinking:
            content = [block for block in content if block["type"] != "thinking"]
        self._messages.append({"role": "assistant", "content": content})


class ResponsesClient:
    """`is_linked` to the response before by its id, or sends all that was said each time."""

    def __init__(self, *, is_linked: bool) -> None:
        self._is_linked = is_linked
        self._before: str | None = None
        self._input: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []

    async def ask(self, http: httpx.AsyncClient, question: str) -> None:
        await self._send(http, [{"role": "user", "content": question}])

    async def tell_results(self, http: httpx.AsyncClient) -> None:
        outputs = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "12"}
            for call in self._calls
        ]
        await self._send(http, outputs)

    async def _send(self, http: httpx.AsyncClient, items: list[dict[str, Any]]) -> None:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
        self._input += items
        body: dict[str, Any] = {"model": MODEL, "tools": tools}
        if self._is_linked:
            body |= {"input": items, "previous_response_id": self._before}
        else:
            body |= {"input": self._input, "store": False}
        answer = await posted(http, "/v1/responses", body)
        self._before = answer["id"]
        self._input += answer["output"]
        self._calls = [item for item in answer["output"] if item["type"] == "function_call"]


class GeminiClient:
    def __init__(self) -> None:
        self._contents: list[dict[str, Any]] = []

    async def ask(self, http: httpx.AsyncClient, question: str) -> None:
        await self._send(http, [{"text": question}])

    async def tell_results(self, http: httpx.AsyncClient) -> None:
        calls = [part["functionCall"] for part in self._contents[-1]["parts"] if "functionCall" in part]
        await self._send(
            http,
            [{"functionResponse": {"name": call["name"], "response": {"result": "12"}}} for call in calls],
        )

    async def _send(self, http: httpx.AsyncClient, parts: list[dict[str, Any]]) -> None:
        self._contents.append({"role": "user", "parts": parts})
        declarations = [{"name": name, "parametersJsonSchema": SCHEMA} for name in NAMES]
        body = {"contents": self._contents, "tools": [{"functionDeclarations": declarations}]}
        answer = await posted(http, f"/v1beta/models/{MODEL}:generateContent", body)
        self._contents.append(answer["candidates"][0]["content"])


CLIENTS: dict[str, Callable[[], Client]] = {
    "chat": ChatClient,
    "messages": partial(MessagesClient, echoes_thinking=True),
    "messages without thinking": partial(MessagesClient, echoes_thinking=False),
    "responses": partial(ResponsesClient, is_linked=False),
    "responses by id": partial(ResponsesClient, is_linked=True),
    "gemini": GeminiClient,
}


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    responses = ResponseStore(None, ResponseBounds(num_bytes=2**20))
    async with http_server(catalog=catalog(), responses=responses) as running:
        yield running
    await responses.close()


@pytest.mark.parametrize("name", CLIENTS)
async def test_each_turn_begins_with_all_tokens_of_the_turn_before(
    server: HttpServer, http: httpx.AsyncClient, name: str
) -> None:
    client = CLIENTS[name]()
    before: list[int] = []
    for turn in range(NUM_TURNS):
        calls = turn % 3 == 1
        output = token_ids(f"<think>\nThought {turn}\n</think>\n\n" + (CALLS if calls else f"Well. {turn}\n"))
        server.dispatcher.script = says(output)
        if turn % 3 == 2:
            await client.tell_results(http)
        else:
            await client.ask(http, f"Question {turn}, with <|im_end|> in it")
        prompt = server.dispatcher.generations[-1].token_ids
        assert prompt[: len(before)] == before, f"turn {turn}"
        before = [*prompt, *output]
    counted = {outcome: count for outcome, count in server.history.num_prompts.items() if count}
    assert counted == {HistoryOutcome.DRIFTED: NUM_TURNS - 1}
