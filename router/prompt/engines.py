"""Renders chat templates with two engines: jinja2's sandbox, the reference, and minijinja, the fast one.

Owns what templates may call, and the fast engine's budget.

minijinja counts its instructions, so an endless loop costs it a few milliseconds. One instruction may still
do a lot: `"x" * 10**9`, or a filter that pads. Templates with such instructions are not *bounded*, nor is
anything that jinja2 renders: those need a process that can be killed (`router/large_bodies/worker.py`).
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import minijinja

from router.prompt.content_form import ContentForm, Messages, find_content_form
from router.prompt.likeness import Watch, is_like, minded_characters
from router.prompt.probes import PROBE_CONVERSATIONS, PROBES_WITH_IMAGES

Render = Callable[[Mapping[str, Any]], str]
Clock = Callable[[], datetime]

FUEL = 500_000
"""Instructions that one conversation may take where others wait for it: 20 ms. A message takes dozens."""

_GROWING_FILTERS = frozenset({"batch", "slice", "format", "indent", "center", "wordwrap", "xmlattr"})
"""Filters whose output can be any size, for any input."""


class TooMuchWork(Exception):
    """The conversation takes more than may be done while others wait."""


class TemplateRefusal(ValueError):
    """The template has called `raise_exception`."""


_PYTHON_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of code that a template calls: both engines let it call methods of its values."""

REFERENCE_FAILURES = (jinja2.TemplateError, *_PYTHON_FAILURES)
FAST_FAILURES = (minijinja.TemplateError, *_PYTHON_FAILURES)


class FastEngine:
    """One template under minijinja. For one thread."""

    def __init__(self, source: str, clock: Clock) -> None:
        self._watch: Watch | None = None
        self._environment = environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            filters={"tojson": self._to_safe_json},
            globals={
                "strftime_now": lambda pattern: clock().strftime(pattern),
                "raise_exception": _raise_plainly,
            },
        )
        environment.add_template("chat", source)

    def render(
        self, variables: Mapping[str, Any], watch: Watch | None = None, *, fuel: int | None = None
    ) -> str:
        """Raises one of FAST_FAILURES, also where `fuel` is not enough. A `watch` is over the variables."""
        self._environment.fuel = fuel
        self._watch = watch
        return self._environment.render_template("chat", **variables)

    def _to_safe_json(self, value: Any, **options: Any) -> str:
        if self._watch is None:
            return minijinja.safe(_to_json(value, **options))
        has_seen = self._watch.has_seen
        text = _to_json(value, **options)
        self._watch.has_seen = has_seen
        return minijinja.safe(text)


def compile_fast(source: str, clock: Clock) -> FastEngine | None:
    """None for a template that minijinja does not understand."""
    try:
        return FastEngine(source, clock)
    except minijinja.TemplateError:
        return None


def compile_reference(source: str, clock: Clock) -> Render:
    """By jinja2. One that cannot be compiled refuses every conversation."""
    environment = _reference_environment()
    environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        message = f"the model's chat template cannot be compiled: {error.message}"

        def refuse(variables: Mapping[str, Any]) -> str:
            raise jinja2.TemplateError(message)

        return refuse
    return lambda variables: _valid(template.render(variables))


def is_bounded(source: str) -> bool:
    """Whether each instruction of the template makes little more than it is given."""
    tree = parsed(source)
    if tree is None:
        return False
    if next(tree.find_all((jinja2.nodes.Mul, jinja2.nodes.Pow)), None) is not None:
        return False
    return not any(_may_grow(used) for used in tree.find_all(jinja2.nodes.Filter))


def parsed(source: str) -> jinja2.nodes.Template | None:
    """None for a template that the reference does not understand."""
    try:
        return _reference_environment().parse(source)
    except (jinja2.TemplateError, RecursionError):
        return None


def _may_grow(used: jinja2.nodes.Filter) -> bool:
    if used.name in ("replace", "join"):  # by as much as the template itself says
        return not all(isinstance(argument, jinja2.nodes.Const) for argument in used.args)
    return used.name in _GROWING_FILTERS


def render_alike(source: str, special_tokens: Mapping[str, str], form: ContentForm) -> bool:
    """Whether the template has nothing that the engines are known to treat differently, and both give the
    same text, or both refuse, for every probe conversation."""
    tree = parsed(source)
    if tree is not None and not is_like(tree):
        return False
    moment = datetime(2024, 7, 26, 13, 5)
    reference, fast = compile_reference(source, lambda: moment), compile_fast(source, lambda: moment)
    assert fast is not None
    for probe in (*PROBE_CONVERSATIONS, *(PROBES_WITH_IMAGES if form.reads_parts else ())):
        variables = {
            **special_tokens,
            "documents": None,
            **probe,
            "messages": form.of_messages(probe["messages"]),
        }
        if _outcome(reference, variables) != _outcome(fast.render, variables):
            return False
    return True


def minded_by(source: str) -> str:
    """Return the characters with which a template that both engines render alike may still differ."""
    tree = parsed(source)
    return "" if tree is None else minded_characters(tree)


def content_form(source: str, special_tokens: Mapping[str, str]) -> ContentForm:
    """Find what the reference shows of contents as texts, and as parts."""
    reference = compile_reference(source, datetime.now)

    def show(messages: Messages) -> str:
        variables = {
            **special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        return _outcome(reference, variables) or ""

    return find_content_form(show)


def _outcome(render: Render, variables: Mapping[str, Any]) -> str | None:
    try:
        return render(variables)
    except (*REFERENCE_FAILURES, *FAST_FAILURES):
        return None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks text for training; when serving, only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it this way)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _reference_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    separators = None if separators is None else (separators[0], separators[1])
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _valid(text: str) -> str:
    """Without halves of surrogate pairs, which no tokenizer takes; as the fast engine leaves them out."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _raise_plainly(message: str) -> str:
    raise TemplateRefusal(message)
