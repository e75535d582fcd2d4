"""AnswerFormat: what chat templates and vocabularies show of how a model marks reasoning and calls."""

import pytest

from replicas.toy_model import toy_model_path
from router.answers.formats import (
    CALL_BEGIN,
    CALL_END,
    PYTHON_TAG,
    AnswerFormat,
    ReasoningMarks,
    ToolSyntax,
    answer_format,
    starts_in_reasoning,
)
from router.prompt.template import ChatTemplate
from tests.router import chat_templates

HELLO = [{"role": "user", "content": "<think>"}]


@pytest.mark.parametrize(
    ("source", "tools", "reasons"),
    [
        (chat_templates.QWEN_25, ToolSyntax.HERMES, False),
        (chat_templates.QWEN_3, ToolSyntax.HERMES, True),
        (chat_templates.QWEN_35, ToolSyntax.QWEN_XML, True),
        (chat_templates.HERMES, ToolSyntax.HERMES, False),
        (chat_templates.LLAMA_31, ToolSyntax.LLAMA, False),
        (chat_templates.DEEPSEEK_R1, None, True),
        (chat_templates.GLM_45, None, True),
        (chat_templates.PLAIN, None, False),
        ("", None, False),
    ],
)
def test_a_template_shows_how_its_model_answers(source: str, tools: ToolSyntax | None, reasons: bool) -> None:
    assert answer_format([source]) == AnswerFormat(tools, ReasoningMarks() if reasons else None)
    assert answer_format([chat_templates.PLAIN, source]) == answer_format([source])


def test_the_toy_model_calls_as_hermes_does() -> None:
    source = (toy_model_path() / "chat_template.jinja").read_text(encoding="utf-8")
    assert answer_format([source]) == AnswerFormat(ToolSyntax.HERMES)


def test_quotes_may_be_escaped_in_a_template() -> None:
    source = r"""{{- "<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}"""
    assert answer_format([source]).tools is ToolSyntax.HERMES


def test_the_vocabulary_shows_marks_of_reasoning_that_no_template_writes() -> None:
    assert answer_format([chat_templates.QWEN_25], ["<think>", "</think>"]).reasoning == ReasoningMarks()
    assert answer_format([chat_templates.QWEN_25], ["<think>"]).reasoning is None
    magistral = answer_format([chat_templates.PLAIN], ["[THINK]", "[/THINK]", "[INST]"])
    assert magistral.reasoning == ReasoningMarks("[THINK]", "[/THINK]")


def test_marks_are_shown_where_they_are_looked_for() -> None:
    hermes = AnswerFormat(ToolSyntax.HERMES, ReasoningMarks())
    assert hermes.marks(wants_calls=True) == {CALL_BEGIN, CALL_END, "<think>", "</think>"}
    assert hermes.marks(wants_calls=False) == {"<think>", "</think>"}
    llama = AnswerFormat(ToolSyntax.LLAMA)
    assert llama.marks(wants_calls=True) == {PYTHON_TAG}
    assert llama.marks(wants_calls=False) == AnswerFormat().marks(wants_calls=True) == frozenset()


@pytest.mark.parametrize(
    ("source", "arguments", "opened"),
    [
        (chat_templates.QWEN_3, {}, False),
        (chat_templates.QWEN_3, {"enable_thinking": False}, False),
        (chat_templates.QWEN_35, {}, True),
        (chat_templates.QWEN_35, {"enable_thinking": False}, False),
        (chat_templates.DEEPSEEK_R1, {}, True),
        (chat_templates.GLM_45, {}, False),
    ],
)
def test_an_answer_starts_in_reasoning_if_the_prompt_has_opened_it(
    source: str, arguments: dict[str, object], opened: bool
) -> None:
    prompt = ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(HELLO, arguments=arguments)
    marks = answer_format([source]).reasoning
    assert starts_in_reasoning(prompt, marks) == opened
    assert starts_in_reasoning(prompt[-40:], marks) == opened
    assert not starts_in_reasoning(prompt, None)
