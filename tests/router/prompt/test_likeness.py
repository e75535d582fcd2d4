"""What the fast engine writes is what the reference writes, whatever a request has in it."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

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
from tests.router.chat_templates import DEEPSEEK_R1, GLM_45, HERMES, LLAMA_31, QWEN_3, QWEN_25, QWEN_35

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


@pytest.mark.parametrize("source", [DEEPSEEK_R1, GLM_45, HERMES, LLAMA_31, QWEN_3, QWEN_25, QWEN_35])
def test_well_known_templates_are_rendered_by_the_fast_engine(source: str) -> None:
    assert ChatTemplate({"default": source}, {"bos_token": "<s>"}).engine == "minijinja"


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
    assert _rendered(WALKING, asked) == _by_reference(WALKS, asked)


WALKING = ChatTemplate({"default": WALKS}, {})


def test_a_request_without_odd_values_is_not_looked_through() -> None:
    assert WALKING.engine == "minijinja"
    assert not may_have_odd_values([{"a": [1, -5, 2**40, True, None, "1.0", "é"]}])
