"""Chat templates: one engine or the other, the same text, whatever a request has in it."""

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from replicas.protocol.status import TokenizerBundle
from router.prompt.content_form import ContentForm
from router.prompt.engines import (
    REFERENCE_FAILURES,
    Render,
    TooMuchWork,
    compile_reference,
    is_bounded,
    minded_by,
    parsed,
)
from router.prompt.likeness import LIKE_FILTERS, is_like, may_have_odd_values
from router.prompt.template import ChatTemplate, TemplateError, TemplateTrial, TemplateVerdict
from tests.examples import examples
from tests.router import chat_templates, tiny_model
from tests.router.chat_templates import DEEPSEEK_R1, GLM_45, HERMES, LLAMA_31, QWEN_3, QWEN_25, QWEN_35

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


@pytest.mark.parametrize(
    "source",
    [
        *(tiny_model.TEMPLATE, TOOL_CALLS, READS_PARTS, READS_BOTH, COMPARES),
        *(DEEPSEEK_R1, GLM_45, HERMES, LLAMA_31, QWEN_3, QWEN_25, QWEN_35),
    ],
)
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


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 1e21 }}", "1e+21"),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text or 1e21 }}{% endfor %}{% endfor %}",
            "1e+21What is it?A cat.",
        ),
    ],
)
def test_a_template_on_which_the_engines_differ_is_left_to_the_reference(source: str, text: str) -> None:
    template = _template(source)
    assert template.engine == "jinja2"
    assert template.render(MIXED[1:3]) == text


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


VALUES: tuple[Any, ...] = (
    *(1.0, -0.0, 0.0, 100.0, 0.1, 1 / 3, 2.5, -1.5, 1e15, 1e16, 1e21, 1.5e300, 1e-4, 1e-5, 5e-324),
    *(math.nan, math.inf, -math.inf, float(2**53), 1e22),
    *(0, 1, -3, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, 2**127, 2**128, -(2**128), 10**40),
    *(True, False, None),
    *("", "abc", "  a b \n", "'\"\\", "<b>&'\"", "\x00\x01\x1b[0m\x7f\t\n\r", "a\r\nb\rc\x0bd\x85e\u2028f"),
    *(
        "\x1c a\x1db\x1e \x1f",
        "👩‍👩‍👧",
        "日本é",
        "ΑΣ Σ",
        "İIıß ŉ ǆ ﬁ",
        "e\u0301",
        "\xa0a\u3000",
        "12",
        "1.0",
        "1e3",
    ),
    *(" 7 ", "0x1f", "true", "None", "a\ud800b"),
    *(
        [],
        [1, 2.5, "a", None, True],
        [1.0],
        [1, 1e16],
        ["b", "A", "a"],
        [[1.0], [{"x": -0.0}]],
        [2**70],
        ["\ud800"],
    ),
    *({}, {"b": 1, "a": 2.5}, {"a": 1.0}, {"a": [1.0, {"b": None, "c": [True, -0.0]}], "z": "é"}),
    *({"a": 2**70}, {"x": {"y": {"z": 1e-7}}}, {"B": 1, "a": "\x1f"}, {"items": 1.0, "get": 2.0}),
)

OF_FILTERS = {
    "default": ("default", "default('x')", "default('x', true)"),
    "dictsort": ("dictsort", "dictsort(by='value')", "dictsort(reverse=true)"),
    "items": ("items | list",),
    "join": ("join", "join(', ')", "join('|', 'a')"),
    "map": (
        "map('string') | join",
        "map('upper') | join",
        "map('tojson') | join(',')",
        "map(attribute='a') | list",
    ),
    "replace": ("replace('a', 'bb')", "replace('\\n', ' ')"),
    "reject": ("reject('none') | list",),
    "rejectattr": ("rejectattr('a') | list | length",),
    "reverse": ("reverse | list",),
    "select": ("select('number') | list",),
    "selectattr": ("selectattr('a', 'equalto', 1) | list | length",),
    "tojson": (
        "tojson",
        "tojson(indent=2)",
        "tojson(ensure_ascii=true)",
        "tojson(separators=(',', ':'))",
        "tojson(sort_keys=true)",
        "tojson | length",
    ),
}

OTHERS = """v
v ~ ''
'%s' % v
[v]
{'k': v}
[v] | tojson
{'k': v} | tojson
(v, 1) | tojson
v if v is string else v | tojson
v is mapping or (v is sequence and v is not string)
v is number
v is integer
v is none
v == 1
v in [1, 'abc']
v + 1
v - 1
v % 2
v // 2
-v
v.a
v['a']
v[0]
v[-1]
v[1:]
v.get('a')
v.get('q', 'none')
v.items() | list
v.keys() | list
v.values() | list
v.strip()
v.lstrip('a')
v.rstrip('\\n')
v.split('a')[0]
v.split(' ') | length
v.startswith('a')
v.replace('a', 'b')
v.upper()
v | string | trim
v | items | list
v | tojson | safe
namespace(x=v).x""".splitlines()

BLOCKS = (
    "{% for x in v %}[{{ x }}]{% endfor %}",
    "{% for x in v %}{{ x | tojson }},{% endfor %}",
    "{% for k, x in v.items() %}{{ k }}={{ x }};{% endfor %}",
    "{% for k, x in v | items %}{{ k }}={{ x | tojson }};{% endfor %}",
    "{% for k in v %}{{ k }}{{ v[k] | string }}{% endfor %}",
    "{% if v %}y{% else %}n{% endif %}{{ not v }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(v) }}",
    "{% set ns = namespace(x=v) %}{{ ns.x | tojson }}",
)

EXPRESSIONS = (
    *(f"{{{{ v | {used} }}}}" for name in sorted(LIKE_FILTERS) for used in OF_FILTERS.get(name, (name,))),
    *(f"{{{{ {expression} }}}}" for expression in OTHERS),
    *BLOCKS,
)

PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "{% set v = messages[0].v %}": lambda value: {"messages": [{"v": value}]},
    "{% set v = messages[0].inner.v %}": lambda value: {"messages": [{"inner": {"v": value}}]},
    "{% set v = tools[0][0] %}": lambda value: {"messages": [], "tools": [[value]]},
    "": lambda value: {"messages": [], "arguments": {"v": value}},
}


@functools.lru_cache(maxsize=8)
def _reference(source: str) -> Render:
    return compile_reference(source, datetime.now)


def _by_reference(source: str, asked: Mapping[str, Any]) -> str | None:
    variables = {**asked.get("arguments", {}), "documents": None, "tools": None, **asked}
    try:
        return _reference(source)(variables)
    except REFERENCE_FAILURES:
        return None


def _rendered(template: ChatTemplate, asked: Mapping[str, Any], *, is_bounded: bool = False) -> str | None:
    try:
        return (template.render_bounded if is_bounded else template.render)(**asked)
    except TemplateError:
        return None


def _by_both(source: str) -> ChatTemplate:
    """Without a trial, which takes a while: no probe has what stands at these places."""
    trial = TemplateTrial("minijinja", is_bounded(source), minded_characters=minded_by(source))
    return ChatTemplate({"default": source}, {}, verdict=TemplateVerdict({"default": trial}))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_values_of_every_kind_are_written_as_the_reference_writes_them(expression: str) -> None:
    for reads, asked_with in PLACES.items():
        source = reads + expression
        tree = parsed(source)
        if tree is None or not is_like(tree):
            assert ChatTemplate({"default": source}, {}).engine == "jinja2"
            continue
        template = _by_both(source)
        for value in VALUES:
            asked = asked_with(value)
            expected = _by_reference(source, asked)
            if expected is not None:
                assert _rendered(template, asked) == expected, (source, value)
                with contextlib.suppress(TooMuchWork):
                    assert _rendered(template, asked, is_bounded=True) == expected, (source, value)


@pytest.mark.parametrize(
    "expression", ["v | e", "v | round", "v.title()", "v / 2", "1.0", "v | map('title') | e"]
)
def test_what_the_engines_treat_differently_is_left_to_the_reference(expression: str) -> None:
    assert ChatTemplate({"default": f"{{{{ {expression} }}}}"}, {}).engine == "jinja2"


def _asked(value: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "number", "default": value, "minimum": 0.0}}}
    function = {"name": "measure", "arguments": {"x": value, "of": [value]}}
    return {
        "messages": [
            {"role": "user", "content": "How long is it?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "2.0", "name": "measure"},
        ],
        "tools": [{"type": "function", "function": {"name": "measure", "parameters": parameters}}],
    }


@pytest.mark.parametrize("value", [1.0, 0.5, 1e16, 2**70, -0.0])
@pytest.mark.parametrize("source", [HERMES, LLAMA_31, QWEN_3, QWEN_35])
def test_numbers_in_calls_and_tools_are_written_as_transformers_writes_them(source: str, value: Any) -> None:
    asked = _asked(value)
    (expected,), _ = render_jinja_template(
        [asked["messages"]],
        chat_template=source,
        tools=asked["tools"],
        add_generation_prompt=True,
        bos_token="<s>",
    )
    assert ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(**asked) == expected


def test_only_a_template_that_takes_odd_numbers_out_of_where_they_stand_is_slow() -> None:
    for source, value, is_slow in ((QWEN_3, 1.0, False), (QWEN_35, 1.0, True), (QWEN_35, 0.5, False)):
        template = ChatTemplate({"default": source}, {})
        if is_slow:
            with pytest.raises(TooMuchWork):
                template.render_bounded(**_asked(value))
        else:
            assert template.render_bounded(**_asked(value)) == template.render(**_asked(value))
        assert template.render_bounded(**_asked(3)) == template.render(**_asked(3))


def test_a_call_with_half_a_surrogate_pair_becomes_a_text_that_can_be_encoded() -> None:
    for source in (HERMES, QWEN_35, "{{ messages | e }}" + HERMES):
        _rendered(ChatTemplate({"default": source}, {}), _asked("a\ud800b")).encode()  # type: ignore[union-attr]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
WALKS = (
    "{% for k, x in (messages[0].v or {}) | items %}{% set y = x if x is string else x | tojson %}"
    "{{ k }}: {{ y }};{% endfor %}"
    "{% macro show(x) %}{% if x is mapping %}{% for k in x %}{{ k }}{{ show(x[k]) }}{% endfor %}"
    "{% elif x is sequence and x is not string %}{% for y in x %}{{ show(y) }}{% endfor %}"
    "{% else %}{{ x }}{% endif %}{% endmacro %}{{ show(messages[0].v) }}{{ messages[0].v }}"
)


@settings(max_examples=examples(200))
@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4))
def test_any_json_is_written_as_the_reference_writes_it(value: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "", "v": value}]}
    assert _rendered(OF_WALKS, asked) == _by_reference(WALKS, asked)


OF_WALKS = ChatTemplate({"default": WALKS}, {})


def test_a_request_without_odd_values_is_not_looked_through() -> None:
    assert OF_WALKS.engine == "minijinja"
    assert not may_have_odd_values([{"a": [1, -5, 2**40, True, None, "1.0", "é"]}])
