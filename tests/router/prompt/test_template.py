"""Chat templates: one engine or the other, the same text."""

import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from replicas.protocol.status import TokenizerBundle
from router.prompt.content_form import ContentForm
from router.prompt.engines import TooMuchWork
from router.prompt.template import ChatTemplate, TemplateError, TemplateTrial
from tests.router import chat_templates, tiny_model

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

READS_PARTS = """{%- for message in messages %}
{{ message['role'] }}{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}
    {%- endfor %}
{%- endfor %}"""

READS_BOTH = """{%- for message in messages %}{{ message.role }}:
    {%- if message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<image>' if 'digest' in part or part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}"""

REFUSES_TEXT = """{%- for message in messages %}
    {%- if message.content is string %}{{ raise_exception('parts, please') }}{% endif %}
    {{- message.content | map(attribute='text') | join('') }}
{%- endfor %}"""

PARTS = "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
OF_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}RESULT{% elif m.content is string %}{{ m.content }}"
    "{% else %}PARTS{% endif %}{% endfor %}"
).replace("PARTS", PARTS)
REFUSES_IMAGES_OF_TOOLS = OF_TOOLS.replace(
    "RESULT",
    "{% for p in m.content %}{{ p.text if p.type == 'text' else raise_exception('text') }}{% endfor %}",
)
"""It writes users' images; what it makes of tools' differs."""

ALL_ROLES = ("user", "assistant", "system", "developer", "tool")

IN_PARTS = """{%- for m in messages %}
    {%- if m.role in ROLES %}{% for part in m.content %}{{ part.text }}{% endfor %}
    {%- else %}{{ m.content if m.content is string else raise_exception('text, please') }}{% endif %}
{%- endfor %}"""
"""It reads the contents of some roles as parts, and of all others as text."""

COMPARES = "{% for m in messages %}{% if m.content > '' %}{{ m.content }}{% endif %}{% endfor %}"
"""One engine compares a list with a text and the other refuses; but no template of text is given a list."""

WALKING = ("QWEN_3_CODER", "QWEN_35", "GLM_46", "MINIMAX_M2")
"""Templates that show the arguments of calls one by one."""

CALLS_METHODS = "{% for m in messages %}{{ m['content'].replace('b', 'c').strip() }}{% endfor %}"

SLICED = (
    "{% for m in messages[::-1] %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
)


def _template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"eos_token": "</s>", "bos_token": "<s>"})


@pytest.mark.parametrize("source", [tiny_model.TEMPLATE, TOOL_CALLS, READS_PARTS, READS_BOTH, COMPARES])
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


IMAGE = {"type": "image", "digest": "00"}
MIXED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "What colour?"},
]
"""Contents with images are parts, all others are text."""


@pytest.mark.parametrize("source", [READS_PARTS, READS_BOTH, REFUSES_TEXT])
def test_all_that_is_said_is_shown_whichever_form_a_template_reads(source: str) -> None:
    def in_parts(message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        return {
            **message,
            "content": [{"type": "text", "text": content}] if content is str(content) else content,
        }

    (expected,), _ = render_jinja_template([[in_parts(each) for each in MIXED]], chat_template=source)
    template = _template(source)
    assert template.render(MIXED, add_generation_prompt=False) == expected
    assert template.render_bounded(MIXED, add_generation_prompt=False) == expected
    for said in ("Be brief.", "What is it?", "A cat.", "What colour?"):
        assert said in expected


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (READS_PARTS, ContentForm(ALL_ROLES, reads_parts=True, shows_found_images=True)),
        (REFUSES_TEXT, ContentForm(ALL_ROLES, reads_parts=True)),
        (READS_BOTH, ContentForm(reads_parts=True, shows_found_images=True)),
        (REFUSES_IMAGES_OF_TOOLS, ContentForm(("tool",), reads_parts=True)),
        (OF_TOOLS.replace("RESULT", "{{ m.content | tojson }}"), ContentForm(reads_parts=True)),
        (OF_TOOLS.replace("RESULT", "{{ m.content }}"), ContentForm(reads_parts=True)),
        (
            OF_TOOLS.replace("m.content is string", "m.role != 'user'").replace("RESULT", PARTS),
            ContentForm(("user", "tool"), reads_parts=True, shows_found_images=True),
        ),
        (tiny_model.TEMPLATE, ContentForm()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentForm()),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", ContentForm()),
        ("{{ raise_exception('never') }}", ContentForm()),
        ("constant", ContentForm()),
        (TOOL_CALLS, ContentForm()),
        *((getattr(chat_templates, name), ContentForm(walks_arguments=True)) for name in WALKING),
        *((getattr(chat_templates, name), ContentForm()) for name in ("QWEN_25", "HERMES", "LLAMA_31")),
    ],
)
def test_it_is_tried_out_which_form_a_template_reads(source: str, form: ContentForm) -> None:
    trial = _template(source).verdict.trials["default"]
    assert trial.content_form == form
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(trial), type=TemplateTrial) == trial


@pytest.mark.parametrize(
    "roles", [roles for number in range(6) for roles in itertools.combinations(ALL_ROLES, number)]
)
def test_each_role_is_shown_where_some_are_read_as_parts_and_others_as_text(roles: tuple[str, ...]) -> None:
    """A tool's result too, which clients send as either."""
    template = _template(IN_PARTS.replace("ROLES", str([*roles])))
    said = {role: f"<{role}>" for role in ALL_ROLES}
    messages = [{"role": role, "content": said[role]} for role in ("system", *ALL_ROLES, "user")]
    assert template.render(messages) == "".join(said[message["role"]] for message in messages)
    form = template.verdict.trials["default"].content_form
    assert form == ContentForm(roles, reads_parts="user" in roles)


@pytest.mark.parametrize("name", WALKING)
def test_a_template_that_walks_over_arguments_shows_what_is_no_object(name: str) -> None:
    template = _template(getattr(chat_templates, name))
    function = {"name": "get", "arguments": '{"a": "b'}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    assert '{"a": "b' in template.render(messages)
    if template.engine == "minijinja":
        assert template.render_bounded(messages) == template.render(messages)


def test_a_template_that_calls_what_a_list_has_not_is_tried_out_to_the_end() -> None:
    template = _template(CALLS_METHODS)
    assert template.engine == "minijinja"
    assert template.render([{"role": "user", "content": " abc "}]) == "acc"
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": [IMAGE]}])
    with pytest.raises(TooMuchWork):
        template.render_bounded([{"role": "user", "content": [IMAGE]}])


def test_engines_that_differ_where_images_are_shown_leave_templates_of_images_to_the_reference() -> None:
    only_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text or 1e21 }}{% endfor %}{% endfor %}"
    template = _template(only_parts)
    assert template.engine == "jinja2"
    assert template.render(MIXED[1:3]) == "1e+21What is it?A cat."


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
