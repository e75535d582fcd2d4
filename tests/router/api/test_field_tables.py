"""Fields of every dialect: honoured, a hint, refused by name, or passed over and counted."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.anthropic.body import MESSAGE, read_message
from router.api.chat_request import ChatRequest
from router.api.completion_prompt import COMPLETION
from router.api.field_table import FieldTable
from router.api.gemini.body import read_gemini
from router.api.gemini.tables import GENERATE, GENERATION_CONFIG
from router.api.openai.chat_body import CHAT, read_chat, read_tokenized_chat
from router.api.responses.body import RESPONSE, read_response
from router.errors import InvalidRequest
from router.observation.unknown_fields import MOST_LOGGED, UnknownFields
from tests.router import tiny_model
from tests.router.http_server import HttpServer
from tests.router.scripted_dispatch import says

DOCUMENTS = sorted((Path(__file__).parents[3] / "docs").glob("api*.md"))
HELLO = [{"role": "user", "content": "Hello"}]
LARGE = "Hello " * 50_000
Reads = Callable[[dict[str, Any]], ChatRequest]


def chat(fields: dict[str, Any]) -> ChatRequest:
    return read_chat(json.dumps({"model": "tiny", "messages": HELLO} | fields).encode(), 4)


def message(fields: dict[str, Any]) -> ChatRequest:
    body = {"model": "tiny", "max_tokens": 8, "messages": HELLO} | fields
    return read_message(json.dumps(body).encode(), 4)


def response(fields: dict[str, Any]) -> ChatRequest:
    return read_response(json.dumps({"model": "tiny", "input": "Hello"} | fields).encode(), 4)


def gemini(fields: dict[str, Any]) -> ChatRequest:
    body = {"model": "models/tiny", "contents": [{"parts": [{"text": "Hello"}]}]} | fields
    return read_gemini(json.dumps(body).encode(), 4)


def configured(fields: dict[str, Any]) -> ChatRequest:
    return gemini({"generationConfig": fields})


def completion(fields: dict[str, Any]) -> ChatRequest:
    _, unknown = COMPLETION.read(json.dumps({"model": "tiny", "prompt": "Hello"} | fields).encode())
    return ChatRequest(model="tiny", messages=[], unknown_fields=unknown)


TABLES: list[tuple[FieldTable[Any], Reads]] = [
    (CHAT, chat),
    (COMPLETION, completion),
    (RESPONSE, response),
    (MESSAGE, message),
    (GENERATE, gemini),
    (GENERATION_CONFIG, configured),
]


@pytest.mark.parametrize(("table", "reads"), TABLES)
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(
    table: FieldTable[Any], reads: Reads
) -> None:
    prefix = "generationConfig." if table is GENERATION_CONFIG else ""
    for name, refusal in table.refused.items():
        for value in ({"deep": [[[0]] * 9]}, "x" * 99, 7.5):
            if name in table.kind.__struct_encode_fields__:
                value = {"max_tokens": 7, "n": 2, "stop": "x", "cache": "x"}.get(name, True)
            with pytest.raises(InvalidRequest) as refused:
                reads({name: value})
            assert refused.value.parameter == prefix + name
            assert "{" not in refused.value.message
        for idle in refusal.idle:
            if name not in table.kind.__struct_encode_fields__:
                assert reads({name: idle}).unknown_fields == []


@pytest.mark.parametrize(("table", "reads"), TABLES)
def test_hints_change_nothing_and_are_known(table: FieldTable[Any], reads: Reads) -> None:
    assert table.refused.keys().isdisjoint(table.hints)
    plain = reads({})
    for value in ("x", 7, True, {"a": [1]}, [{}], None):
        assert reads(dict.fromkeys(table.hints, value)) == plain


@pytest.mark.parametrize(("table", "reads"), TABLES)
def test_other_fields_are_passed_over_and_told_by_their_names(table: FieldTable[Any], reads: Reads) -> None:
    prefix = "generationConfig." if table is GENERATION_CONFIG else ""
    request = reads({"newest": {"a": 1}, "": 0, next(iter(sorted(table.hints))): 1})
    assert request.unknown_fields == [f"{prefix}newest", prefix]
    assert len(reads({f"field_{number}": 0 for number in range(1000)}).unknown_fields) == 32


def test_objects_in_fields_have_tables_of_their_own() -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True, "includeUsage": True}}
    for reads in (chat, completion, response):
        assert reads(asked).unknown_fields == ["stream_options.includeUsage"]
    asked = {"reasoning": {"efort": "none"}, "text": {"verbosity": "low", "fromat": {}}}
    assert response(asked).unknown_fields == ["reasoning.efort", "text.fromat"]
    config = {"thinkingConfig": {"thinkingLevel": "LOW", "level": 1}}
    assert configured(config).unknown_fields == ["generationConfig.thinkingConfig.level"]


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": True, "enable_thinking": True}, {"enable_thinking": True, "thinking": True}),
        (
            {"thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "thinking": False},
        ),
        ({"enable_thinking": None, "thinking": None}, {}),
    ],
)
def test_thinking_at_the_top_of_a_chat_is_given_to_the_template(
    fields: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert chat(fields).template_arguments == arguments
    body = json.dumps({"messages": HELLO} | fields).encode()
    assert read_tokenized_chat(body).template_arguments == arguments


def test_stop_token_ids_of_messages_are_honoured() -> None:
    assert message({"stop_token_ids": [3]}).stop_token_ids == [3]


def test_a_timeout_in_geminis_body_is_honoured() -> None:
    assert gemini({"timeout": 2.5}).timeout == 2.5
    with pytest.raises(InvalidRequest, match="timeout"):
        gemini({"timeout": 0})


FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object"}}
SCHEMA = {"name": "f", "input_schema": {"type": "object"}}


def test_tools_that_others_run_are_passed_over_and_those_of_a_new_kind_counted() -> None:
    known = [
        {"type": "web_search"},
        {"type": "web_search_preview_2025_03_11"},
        {"type": "custom", "name": "x"},
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
        FUNCTION | {"type": "function"},
    ]
    request = response({"tools": [*known, {"type": "web_serch"}]})
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    assert request.unknown_fields == ["tools.web_serch"]
    known = [
        {"type": "web_search_20250305", "name": "web_search"},
        SCHEMA,
        SCHEMA | {"name": "g", "type": "custom"},
    ]
    request = message({"tools": [*known, {"type": "bash", "name": "bash"}]})
    assert [tool["function"]["name"] for tool in request.tools] == ["f", "g"]
    assert request.unknown_fields == ["tools.bash"]


BODIES: list[tuple[str, str, dict[str, Any], str]] = [
    ("chat", "/v1/chat/completions", {"model": "tiny", "messages": HELLO}, "typical_p"),
    ("completion", "/v1/completions", {"model": "tiny", "prompt": "Hello"}, "num_beams"),
    ("messages", "/v1/messages", {"model": "tiny", "max_tokens": 8, "messages": HELLO}, "max_new_tokens"),
    ("responses", "/v1/responses", {"model": "tiny", "input": "Hello"}, "web_search_options"),
    (
        "gemini",
        "/v1beta/models/tiny:generateContent",
        {"contents": [{"parts": [{"text": "Hello"}]}]},
        "noStopTrim",
    ),
]


def counted(server: HttpServer, dialect: str) -> float:
    start = f'router_unknown_fields_total{{dialect="{dialect}"}} '
    lines = server.context.metrics.render().decode().splitlines()
    return next(float(line.removeprefix(start)) for line in lines if line.startswith(start))


@pytest.mark.parametrize(("dialect", "path", "body", "refused"), BODIES)
async def test_small_and_large_bodies_are_read_by_the_same_tables(
    server: HttpServer, http: httpx.AsyncClient, dialect: str, path: str, body: dict[str, Any], refused: str
) -> None:
    server.dispatcher.script = says([tiny_model.END_OF_TURN])
    hints = {"store": False, "client_metadata": {"a": 1}, "filler": LARGE}
    for number, more in enumerate(({}, hints), 1):
        answer = await http.post(path, json=body | more | {"newest": 1})
        assert answer.status_code == 200, answer.text
        answer = await http.post(path, json=body | more | {refused: {}})
        wrong = refused == "web_search_options"
        assert answer.status_code == (400 if wrong else 200), answer.text
        answer = await http.post(path, json=body | more | {refused: 0.25})
        assert answer.status_code == 400 and refused in answer.text
        num_fillers = 0 if number == 1 else 2 - wrong
        assert counted(server, dialect) == number + num_fillers


async def test_what_is_no_json_is_told_as_before(http: httpx.AsyncClient) -> None:
    begun = json.dumps(BODIES[0][2]).encode()[:-1]
    for rest, code in (
        (b', "\xff": 1}', "invalid_json"),
        (b', "typical_p": 1e999}', "unsupported_value"),
        (b', "typical_p": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", None),
        (b', "newest": [}', "invalid_json"),
        (b', "n": "x", "newest": 1}', "invalid_type"),
    ):
        answer = await http.post("/v1/chat/completions", content=begun + rest)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == code or code is None


def test_the_log_names_a_field_once_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    numbers: list[int] = []
    fields = UnknownFields(lambda dialect, number: numbers.append(number))
    with caplog.at_level(logging.INFO):
        fields.count("chat", [])
        fields.count("chat", ["newest", "new\nline" + "x" * 999])
        fields.count("chat", ["newest"])
        assert len(caplog.records) == 2
        for number in range(1000):
            fields.count("chat", [f"field_{number}"])
    assert len(caplog.records) == MOST_LOGGED
    assert all(
        len(record.getMessage()) < 200 and "\n" not in record.getMessage() for record in caplog.records
    )
    assert sum(numbers) == 1003


def test_every_field_that_is_a_hint_or_refused_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    for table, _ in TABLES:
        names = {name for name in (*table.hints, *table.refused) if f"`{name}`" not in text}
        assert not {name for name in names if not _is_other_spelling(name, text)}


def _is_other_spelling(name: str, text: str) -> bool:
    """Google's parser has two of each, and one is documented."""
    first, *rest = name.split("_")
    camel = "".join([first, *(word.capitalize() for word in rest)])
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return f"`{camel}`" in text or f"`{snake}`" in text
