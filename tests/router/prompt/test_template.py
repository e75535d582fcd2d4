"""Chat templates: one engine or the other, the same text."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from replicas.protocol.status import TokenizerBundle
from router.prompt.template import ChatTemplate, TemplateError
from tests.router import tiny_model

HELLO = [{"role": "user", "content": "Hello <b>&</b> 'you'"}]
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": {"città": "<&>", "x": [1.5, None, True]}}}
]

TOOL_CALLS = """{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
{{ call.function.name }}({{ call.function.arguments | tojson }})
        {%- endfor %}
    {%- else %}
{{ message.role }}: {{ message.content | trim }}{{ eos_token }}
    {%- endif %}
{%- endfor %}"""

SLICED = (
    "{% for m in messages[::-1] %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
)


def _template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"eos_token": "</s>", "bos_token": "<s>"})


@pytest.mark.parametrize("source", [tiny_model.TEMPLATE, TOOL_CALLS])
def test_common_templates_are_rendered_by_the_fast_engine(source: str) -> None:
    assert _template(source).engine == "minijinja"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "source", [tiny_model.TEMPLATE, TOOL_CALLS, SLICED, "{% generation %}{{ bos_token }}x{% endgeneration %}"]
)
def test_the_text_is_that_of_transformers(source: str, tools: list[dict[str, object]] | None) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]
    (expected,), _ = render_jinja_template(
        [messages],
        chat_template=source,
        tools=tools,
        add_generation_prompt=True,
        eos_token="</s>",
        bos_token="<s>",
    )
    assert _template(source).render(messages, tools=tools) == expected


def test_a_template_on_which_the_engines_differ_is_left_to_the_reference() -> None:
    template = _template("{{ 1e21 }}")
    assert template.engine == "jinja2"
    assert template.render(HELLO) == "1e+21"


def test_a_refusal_of_the_template_reaches_the_client_as_its_own_sentence() -> None:
    with pytest.raises(TemplateError, match="not this one"):
        _template(tiny_model.TEMPLATE).render([{"role": "user", "content": "refuse me"}])


def test_templates_can_ask_for_the_date() -> None:
    template = ChatTemplate(
        {"default": "{{ strftime_now('%d %b %Y') }}"}, {}, clock=lambda: datetime(2025, 3, 4)
    )
    assert template.render(HELLO) == "04 Mar 2025"


def test_text_of_users_is_never_run_as_a_template() -> None:
    text = _template(tiny_model.TEMPLATE).render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in text


def test_the_sandbox_keeps_templates_from_python() -> None:
    with pytest.raises(TemplateError):
        _template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(HELLO)


def test_a_missing_template_says_how_to_fix_it() -> None:
    template = ChatTemplate.from_bundle(tiny_model.bundle(None))
    assert template.is_missing
    with pytest.raises(TemplateError, match="chat_template"):
        template.render(HELLO)


def test_named_templates_are_chosen_by_the_presence_of_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config = json.dumps({"chat_template": named}).encode()
    template = ChatTemplate.from_bundle(TokenizerBundle({"tokenizer_config.json": config}))
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=TOOLS) == "tools"


def test_a_template_file_wins_over_the_configuration_whose_tokens_it_can_use() -> None:
    config = json.dumps({"chat_template": "no", "bos_token": {"content": "<s>"}}).encode()
    files = {"tokenizer_config.json": config, "chat_template.jinja": b"{{ bos_token }}file"}
    assert ChatTemplate.from_bundle(TokenizerBundle(files)).render(HELLO) == "<s>file"


def test_a_template_that_cannot_be_compiled_fails_the_chat_not_the_model() -> None:
    with pytest.raises(TemplateError, match="compiled"):
        _template("{% if %}").render(HELLO)


def test_the_model_that_ships_renders_with_the_fast_engine() -> None:
    folder = Path(__file__).parents[3] / "replicas" / "toy_model"
    names = ("tokenizer_config.json", "chat_template.jinja")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    template = ChatTemplate.from_bundle(TokenizerBundle(files))
    assert template.engine == "minijinja"
    assert "Hello" in template.render([{"role": "user", "content": "Hello"}])
