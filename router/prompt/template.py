"""ChatTemplate: a conversation → the one text that the model was trained to continue.

Owns the choice of engine (minijinja where it provably renders what jinja2 does, else jinja2's sandbox)
and what templates may call. Knows nothing of tokens, of HTTP or of which fields a dialect has.

Templates come with checkpoints and are foreign code: they only ever see plain JSON values.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import minijinja

from replicas.protocol.status import TokenizerBundle
from router.prompt.probes import PROBE_CONVERSATIONS

Message = Mapping[str, Any]
Render = Callable[[Mapping[str, Any]], str]
Clock = Callable[[], datetime]

DEFAULT_NAME = "default"
TOOL_USE_NAME = "tool_use"

RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that a client sets through fields of their own, never through extra arguments."""


class TemplateError(ValueError):
    """The template is missing or refused this conversation. The message is fit for the client."""


class ChatTemplate:
    """The templates of one model: `default`, and `tool_use` where there is one."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], clock: Clock = datetime.now
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._templates = {
            name: _CompiledTemplate(source, self._special_tokens, clock) for name, source in sources.items()
        }

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle, clock: Clock = datetime.now) -> "ChatTemplate":
        config = _tokenizer_config(bundle)
        return cls(_sources(bundle, config), _special_tokens(config), clock)

    @property
    def is_missing(self) -> bool:
        return not self._templates

    @property
    def engine(self) -> str | None:
        """Which engine renders: minijinja or jinja2; None without a template."""
        return None if self.is_missing else self._choose(has_tools=False).engine

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises TemplateError. `arguments` are further template variables (`enable_thinking`, …)."""
        if self.is_missing:
            raise TemplateError(
                "this model has no chat template; use /v1/completions, or add a chat_template to the"
                " checkpoint's tokenizer_config.json (or a chat_template.jinja) and restart its replicas"
            )
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(arguments or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._choose(has_tools=tools is not None).render(variables)

    def _choose(self, *, has_tools: bool) -> "_CompiledTemplate":
        if has_tools and TOOL_USE_NAME in self._templates:
            return self._templates[TOOL_USE_NAME]
        return self._templates.get(DEFAULT_NAME) or next(iter(self._templates.values()))


class _CompiledTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        self._reference = _compile_jinja2(source, clock)
        fast = _compile_minijinja(source, clock)
        if fast is not None and not _render_alike(source, special_tokens):
            fast = None
        self._fast = fast
        self.engine = "jinja2" if fast is None else "minijinja"

    def render(self, variables: Mapping[str, Any]) -> str:
        if self._fast is not None:
            try:
                return self._fast(variables)
            except (minijinja.TemplateError, TypeError, ValueError, RecursionError):
                pass  # the reference has the last word, and the better sentence
        try:
            return self._reference(variables)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused these messages: {error.message}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


def _render_alike(source: str, special_tokens: Mapping[str, str]) -> bool:
    """Whether both engines give the same text, or both refuse, for every probe conversation."""
    moment = datetime(2024, 7, 26, 13, 5)
    reference, fast = _compile_jinja2(source, lambda: moment), _compile_minijinja(source, lambda: moment)
    assert fast is not None

    def outcome(render: Render, variables: Mapping[str, Any]) -> str | None:
        try:
            return render(variables)
        except (jinja2.TemplateError, minijinja.TemplateError, TypeError, ValueError, KeyError):
            return None

    for probe in PROBE_CONVERSATIONS:
        variables = {**special_tokens, "documents": None, **probe}
        if outcome(reference, variables) != outcome(fast, variables):
            return False
    return True


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer learns from; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it this way)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile_jinja2(source: str, clock: Clock) -> Render:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        message = f"the model's chat template cannot be compiled: {error.message}"

        def refuse(variables: Mapping[str, Any]) -> str:
            raise jinja2.TemplateError(message)

        return refuse
    return lambda variables: template.render(variables)


def _compile_minijinja(source: str, clock: Clock) -> Render | None:
    def to_json(value: Any, **options: Any) -> str:
        return minijinja.safe(_to_json(value, **options))

    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        filters={"tojson": to_json},
        globals={
            "strftime_now": lambda pattern: clock().strftime(pattern),
            "raise_exception": _raise_plainly,
        },
    )
    try:
        environment.add_template("chat", source)
    except minijinja.TemplateError:
        return None
    return lambda variables: environment.render_template("chat", **variables)


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


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _raise_plainly(message: str) -> str:
    raise ValueError(message)


def _tokenizer_config(bundle: TokenizerBundle) -> Mapping[str, Any]:
    source = bundle.files.get("tokenizer_config.json", b"{}")
    try:
        config = json.loads(source)
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _sources(bundle: TokenizerBundle, config: Mapping[str, Any]) -> dict[str, str]:
    """Named template sources. A `chat_template.jinja` wins over the one in the tokenizer's config."""
    template_file = bundle.files.get("chat_template.jinja")
    if template_file is not None:
        return {DEFAULT_NAME: template_file.decode("utf-8", "replace")}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        return {DEFAULT_NAME: configured}
    if isinstance(configured, dict):
        return {str(name): source for name, source in configured.items() if isinstance(source, str)}
    if isinstance(configured, list):
        return {
            entry["name"]: entry["template"]
            for entry in configured
            if isinstance(entry, dict) and isinstance(entry.get("template"), str) and "name" in entry
        }
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … under the names that templates read."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens
