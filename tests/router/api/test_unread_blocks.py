"""No block of a tool's result or an earlier answer ends a conversation: the model is told of what it cannot
read, by every dialect, and the rest of the prompt is as it would be."""

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from replicas.media.probes import probe_png
from replicas.protocol.image_rules import CellRule, written_rule
from replicas.protocol.media import MAX_IMAGES
from router.api.chat_prompt import as_read, counted_chat
from router.api.chat_request import ChatRequest
from router.api.dialects import DIALECTS
from router.api.logged_prompts import LoggedModel, logged_prompts
from router.explain.linting.log_lines import read_line
from router.explain.places import PlaceKind, PromptPlaces
from router.features.history.feature import HistoryOutcome
from router.prompt.catalog import ModelCatalog
from tests.router import chat_templates, tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

MODEL = tiny_model.MODEL
PNG, STRIP = probe_png(32, 16, b"\xff\0\0"), probe_png(3000, 2, b"\xff\0\0")
RULE = written_rule(CellRule(placeholder=0, cell=4, min_pixels=16, max_pixels=16 * 1000))
IN_PARTS = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<|endoftext|>' if SHOWN }}{%- endfor %}{%- endif %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}"
)
TEMPLATES = {
    "text": chat_templates.QWEN_3,
    "images": IN_PARTS.replace("SHOWN", "true"),
    "images of users": IN_PARTS.replace("SHOWN", "message.role == 'user'"),
}
AN_IMAGE = "[an image, which cannot be read here]"


def coded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def catalog(reads: str) -> ModelCatalog:
    made = ModelCatalog(tiny_model.SECRET)
    card = replace(tiny_model.card(context_length=4096), image_rule="" if reads == "text" else RULE)
    made.add(card, tiny_model.bundle(TEMPLATES[reads]))
    return made


FOUND: dict[str, dict[str, Any]] = {
    "chat": {
        "image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded(PNG)}"}},
        "strip": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded(STRIP)}"}},
        "broken": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        "address": {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        "a file": {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
        "a recording": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "something": {"type": "hologram", "light": 1},
    },
    "responses": {
        "image": {"type": "input_image", "image_url": f"data:image/png;base64,{coded(PNG)}"},
        "strip": {"type": "input_image", "image_url": f"data:image/png;base64,{coded(STRIP)}"},
        "broken": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        "address": {"type": "input_image", "file_id": "file-1"},
        "a file": {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"},
    },
    "messages": {
        **{
            what: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
            for what, data in {"image": coded(PNG), "strip": coded(STRIP), "broken": "A"}.items()
        },
        "address": {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        "a document": {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
        },
    },
    "gemini": {
        "image": {"inlineData": {"mimeType": "image/png", "data": coded(PNG)}},
        "strip": {"inlineData": {"mimeType": "image/png", "data": coded(STRIP)}},
        "broken": {"inline_data": {"mime_type": "image/png", "data": "AAAA"}},
        "address": {"fileData": {"mimeType": "image/png", "fileUri": "gs://a/b"}},
        "a file": {"inlineData": {"mimeType": "application/pdf", "data": "AAAA"}},
        "a video": {"fileData": {"mimeType": "video/mp4", "fileUri": "gs://a/b"}},
        "something": {"hologram": 1},
    },
}
CASES = [(dialect, what) for dialect, blocks in FOUND.items() for what in blocks]


def asked(dialect: str, *found: Any, says_it: str = "tool") -> dict[str, Any]:
    """A conversation in which a tool, the user or the assistant has said these blocks."""
    a_tool = says_it == "tool"
    role = {"user": "user", "assistant": "assistant"}.get(says_it, "user")
    if dialect == "chat":
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        turns: list[Any] = [{"role": "assistant", "tool_calls": [call]}] if a_tool else []
        more = {"role": "tool", "tool_call_id": "c"} if a_tool else {"role": role}
        return {"messages": [{"role": "user", "content": "Look."}, *turns, {**more, "content": [*found]}]}
    if dialect == "responses":
        said: dict[str, Any] = {"role": role, "content": [*found]}
        if a_tool:
            said = {"type": "function_call_output", "call_id": "c", "output": [*found]}
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        return {"input": [{"role": "user", "content": "Look."}, *([call] if a_tool else []), said]}
    if dialect == "messages":
        use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        call = {"role": "assistant", "content": [use]}
        content = [{"type": "tool_result", "tool_use_id": "c", "content": [*found]}] if a_tool else [*found]
        turns = [*([call] if a_tool else []), {"role": role, "content": content}]
        return {"max_tokens": 9, "messages": [{"role": "user", "content": "Look."}, *turns]}
    parts = [{"functionResponse": {"name": "look", "parts": [*found]}}] if a_tool else [*found]
    called = [{"role": "model", "parts": [{"functionCall": {"name": "look"}}]}] if a_tool else []
    said = {"role": "model" if says_it == "assistant" else "user", "parts": parts}
    return {"contents": [{"role": "user", "parts": [{"text": "Look."}]}, *called, said]}


def path_of(dialect: str, what: str) -> str:
    """Of the block in the body that a tool has said."""
    kind = next(iter(FOUND[dialect][what]))
    return {
        "chat": "messages[2].content[0]",
        "responses": "input[2].output[0]",
        "messages": "messages[2].content[0].content[0]",
        "gemini": f"contents[2].parts[0].functionResponse.parts[0].{kind}",
    }[dialect]


def read(dialect: str, body: dict[str, Any]) -> ChatRequest:
    return DIALECTS[dialect].read(json.dumps({"model": MODEL, **body}).encode(), 8)


ROUTES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": f"/v1beta/models/{MODEL}:generateContent",
}


@pytest.fixture(params=["text"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog(request.param)) as running:
        running.dispatcher.script = says([40, 41])
        yield running


def words_for(what: str) -> str:
    return f"[{what}, which cannot be read here]" if what[1] in " o" and what != "broken" else AN_IMAGE


@pytest.mark.parametrize(("dialect", "what"), CASES)
async def test_a_model_of_text_is_told_and_every_later_turn_is_served(
    server: HttpServer, http: httpx.AsyncClient, dialect: str, what: str
) -> None:
    body = asked(dialect, FOUND[dialect][what])
    later = (
        {"role": "user", "parts": [{"text": "And?"}]}
        if "contents" in body
        else {"role": "user", "content": "And?"}
    )
    for more in ([], [later]):
        turns = next(name for name in ("messages", "input", "contents") if name in body)
        sent = {"model": MODEL, **body, turns: body[turns] + more}
        answer = await http.post(ROUTES[dialect], json=sent)
        assert answer.status_code == 200, answer.text
        prompt = catalog("text").get(MODEL).tokenizer.decode(server.dispatcher.generations[-1].token_ids)
        assert prompt.count(words_for(what)) == 1 and not server.dispatcher.generations[-1].media
        place = PromptPlaces(sent, prompt).at(prompt.index(words_for(what)) + 2)
        if what != "something":
            assert (place.path, place.kind) == (path_of(dialect, what), PlaceKind.VALUE)


@pytest.mark.parametrize("dialect", FOUND)
async def test_a_users_own_image_is_refused_and_an_answers_is_told(
    server: HttpServer, http: httpx.AsyncClient, dialect: str
) -> None:
    for says_it, status in (("user", 400), ("assistant", 200)):
        body = asked(dialect, FOUND[dialect]["image"], says_it=says_it)
        answer = await http.post(ROUTES[dialect], json={"model": MODEL, **body})
        assert answer.status_code == status, answer.text
    prompt = catalog("text").get(MODEL).tokenizer.decode(server.dispatcher.generations[-1].token_ids)
    assert AN_IMAGE in prompt


@pytest.mark.parametrize(("dialect", "what"), CASES)
def test_a_model_of_images_reads_what_it_can_and_is_told_of_the_rest(dialect: str, what: str) -> None:
    for reads, is_shown in (("images", what == "image"), ("images of users", False)):
        model = catalog(reads).get(MODEL)
        request = as_read(model, read(dialect, asked(dialect, FOUND[dialect][what])))
        shown = counted_chat(catalog(reads), request, is_bounded=False)
        assert len(shown.images) == len(request.images) == is_shown
        assert (words_for(what) in model.tokenizer.decode(shown.token_ids)) is not is_shown


@pytest.mark.parametrize("dialect", FOUND)
def test_what_a_tool_found_too_many_of_is_told_and_what_came_first_stays(dialect: str) -> None:
    request = read(dialect, asked(dialect, *[FOUND[dialect]["image"]] * (MAX_IMAGES + 2)))
    content = request.messages[-1]["content"]
    assert len(request.images) == MAX_IMAGES
    assert content[MAX_IMAGES:] == [{"type": "text", "text": f"{AN_IMAGE}\n{AN_IMAGE}"}]


@pytest.mark.parametrize("dialect", FOUND)
def test_a_logged_request_with_such_an_image_is_read(dialect: str) -> None:
    body = asked(dialect, FOUND[dialect]["image"])
    line = read_line(json.dumps({"model": MODEL, **body}).encode())
    (prompt,) = logged_prompts(LoggedModel.of(tiny_model.bundle(TEMPLATES["text"])), line, 1, 16)
    assert AN_IMAGE in catalog("text").get(MODEL).tokenizer.decode(list(prompt.token_ids))


async def test_the_conversation_goes_on_from_its_own_tokens(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    body = asked("chat", FOUND["chat"]["image"])
    for _ in range(2):
        answer = await http.post(ROUTES["chat"], json={"model": MODEL, **body})
        message = answer.json()["choices"][0]["message"]
        body["messages"] += [message, {"role": "user", "content": "And?"}]
    first, second = (each.token_ids for each in server.dispatcher.generations)
    assert list(second[: len(first) + 2]) == [*first, 40, 41]
    outcomes = server.history.num_prompts
    assert outcomes[HistoryOutcome.EXACT] + outcomes[HistoryOutcome.DRIFTED] == 1


@pytest.mark.parametrize(
    ("dialect", "what", "said"),
    [
        (
            "chat",
            {"role": "assistant", "content": None, "audio": {"id": "a"}},
            "[a recording, which cannot be read here]",
        ),
        ("responses", {"type": "image_generation_call", "id": "i", "result": coded(PNG)}, AN_IMAGE),
        (
            "responses",
            {"type": "compaction", "encrypted_content": "x"},
            "[a summary of earlier turns, which cannot be read here]",
        ),
    ],
)
def test_an_answer_that_was_no_text_is_told(dialect: str, what: Any, said: str) -> None:
    body = {"messages" if dialect == "chat" else "input": [{"role": "user", "content": "Hi"}, what]}
    assert read(dialect, body).messages[1:] == [{"role": "assistant", "content": said}]
