"""A model that answers by heart, and a client that sends its answers back in words of its own."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Reference

from replicas.protocol.status import TokenizerBundle
from router.answers.formats import AnswerFormat, answer_format, starts_in_reasoning
from router.answers.parser import AnswerParser
from router.answers.parts import CallArguments, CallStart, Text
from router.prompt.quoting import Quoter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from tests.router import chat_templates, tiny_model

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    }
]

SPECIAL_TOKENS = [
    *["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    *["<|eot_id|>", "<|python_tag|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
]


@dataclass(frozen=True)
class Speaker:
    """One family of models: its template, how it ends a turn, how it thinks and calls."""

    name: str
    template: ChatTemplate
    end_of_turn: str
    answer_format: AnswerFormat
    thought: str
    call: str

    def answer(self, turn: int, *, calls: bool) -> str:
        """What it writes, with blanks and number formats that no template would write again."""
        thought = self.thought.format(turn=turn)
        if calls and self.call:
            return thought + self.call.replace("TURN", str(turn))
        return f"{thought}It is turn {turn}, and all is well.\n"


def speaker(name: str, source: str, end_of_turn: str, thought: str, call: str) -> Speaker:
    template = ChatTemplate({"default": source}, {"bos_token": "<|begin_of_text|>"})
    return Speaker(name, template, end_of_turn, answer_format([source]), thought, call)


HERMES_CALL = (
    'I look.\n<tool_call>\n{"name":"look_up",  "arguments": {"word": "wTURN", "count":TURN.0}}\n</tool_call>'
)
XML_CALL = (
    "I look.\n\n\n<tool_call><function=look_up>\n<parameter=word>\nwTURN\n</parameter>"
    "<parameter=count>TURN</parameter>\n</function></tool_call>"
)
THOUGHT = "<think>\nTurn {turn}: what now?\n</think>\n\n"

SPEAKERS = [
    speaker("qwen 2.5", chat_templates.QWEN_25, "<|im_end|>", "", HERMES_CALL),
    speaker("qwen 3", chat_templates.QWEN_3, "<|im_end|>", THOUGHT, HERMES_CALL),
    speaker("qwen 3.5", chat_templates.QWEN_35, "<|im_end|>", THOUGHT.removeprefix("<think>"), XML_CALL),
    speaker("hermes", chat_templates.HERMES, "<|im_end|>", "", HERMES_CALL.removeprefix("I look.")),
    speaker(
        "llama 3.1",
        chat_templates.LLAMA_31,
        "<|eot_id|>",
        "",
        '{"name": "look_up", "parameters": {"count": TURN, "word":"w"}}',
    ),
    speaker(
        "deepseek r1", chat_templates.DEEPSEEK_R1, "<｜end▁of▁sentence｜>", "Hm {turn}.\n</think>\n\n", ""
    ),
]


@functools.cache
def tokenizer() -> Tokenizer:
    reference = Reference.from_buffer(tiny_model.tokenizer_json())
    reference.add_special_tokens(SPECIAL_TOKENS)
    return Tokenizer(TokenizerBundle({"tokenizer.json": reference.to_str().encode()}))


@functools.cache
def quoter() -> Quoter:
    return Quoter(tokenizer().special_tokens)


def echoed(who: Speaker, prompt: str, answer: str) -> dict[str, Any]:
    """The client's own message of an answer: no reasoning, arguments parsed and written out anew."""
    parser = AnswerParser(
        who.answer_format,
        wants_calls=True,
        starts_in_reasoning=starts_in_reasoning(prompt, who.answer_format.reasoning),
        tools=TOOLS,
    )
    parts = [*parser.feed(answer), *parser.finish()]
    text = "".join(part.text for part in parts if isinstance(part, Text))
    message: dict[str, Any] = {"role": "assistant", "content": text.strip()}
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append({"id": f"call-{part.position}", "name": part.name, "arguments": ""})
        elif isinstance(part, CallArguments):
            calls[-1]["arguments"] += part.text
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
            }
            for call in calls
        ]
    return message


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What the client's tools say to its calls."""
    calls: Sequence[dict[str, Any]] = message.get("tool_calls", ())
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['function']['name']}"}
        for call in calls
    ]
