"""ChatTemplate: renders a conversation to the text that the model was trained to continue.

Owns the choice of engine, for a template and for a request: minijinja where it provably renders like jinja2,
else jinja2's sandbox. Does not know tokens, HTTP, or the fields of dialects.

Templates come with checkpoints and are foreign code: they see only plain JSON values, and may never end.
Trying one out, and `render`, need a process that can be killed; elsewhere use `render_bounded`.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec

from replicas.protocol.status import TokenizerBundle
from router.prompt.content_form import ContentForm
from router.prompt.engines import (
    FAST_FAILURES,
    FUEL,
    REFERENCE_FAILURES,
    Clock,
    FastEngine,
    TemplateRefusal,
    TooMuchWork,
    compile_fast,
    compile_reference,
    content_form,
    is_bounded,
    minded_by,
    render_alike,
)
from router.prompt.likeness import Watch, may_have_odd_values

Message = Mapping[str, Any]

MINIJINJA = "minijinja"
JINJA2 = "jinja2"

DEFAULT_NAME = "default"
TOOL_USE_NAME = "tool_use"

RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that a client sets through fields of their own, never through extra arguments."""


MISSING = (
    "this model has no chat template; use /v1/completions, or add a chat_template to the"
    " checkpoint's tokenizer_config.json (or a chat_template.jinja) and restart its replicas"
)


class TemplateError(ValueError):
    """The template is missing or refused this conversation. The message is fit for the client."""


class TemplateTrial(msgspec.Struct, frozen=True):
    """Result of trying a template: the engine that renders it, whether its work is bounded, the form of
    content that it reads, and the characters that only the reference can render."""

    engine: str
    is_bounded: bool
    content_form: ContentForm = ContentForm()
    minded_characters: str = ""


class TemplateVerdict(msgspec.Struct, frozen=True):
    """Results for all templates of a model, by name; or the error of one."""

    trials: dict[str, TemplateTrial] = {}
    complaint: str | None = None


class ChatTemplate:
    """The templates of one model: `default`, and `tool_use` if there is one.

    With a verdict nothing is tried out: not even compiled, if there is a complaint.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        clock: Clock = datetime.now,
        verdict: TemplateVerdict | None = None,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._complaint = MISSING if verdict is None or verdict.complaint is None else verdict.complaint
        self._templates: dict[str, _CompiledTemplate] = {}
        self.sources = tuple(sources.values())
        self.tag = _tag(sources)
        """Tells it from others: a digest of its sources."""
        self.knows_developers = any("developer" in source for source in self.sources)
        """Whether it has words of its own for messages with the role `developer`."""
        if verdict is not None and verdict.complaint is not None:
            return
        for name, source in sources.items():
            trial = _try_out(source, special_tokens) if verdict is None else verdict.trials[name]
            self._templates[name] = _CompiledTemplate(source, trial, clock)

    @classmethod
    def from_bundle(
        cls, bundle: TokenizerBundle, clock: Clock = datetime.now, *, verdict: TemplateVerdict | None = None
    ) -> "ChatTemplate":
        config = _tokenizer_config(bundle)
        return cls(_sources(bundle, config), _special_tokens(config), clock, verdict)

    @property
    def verdict(self) -> TemplateVerdict:
        return TemplateVerdict({name: template.trial for name, template in self._templates.items()})

    @property
    def is_missing(self) -> bool:
        return not self._templates

    @property
    def engine(self) -> str | None:
        """Return the engine: minijinja or jinja2; None without a template."""
        return None if self.is_missing else self._choose(has_tools=False).trial.engine

    @property
    def shows_found_images(self) -> bool:
        """Whether prompts have the images in the results of tools."""
        return all(each.trial.content_form.shows_found_images for each in self._templates.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises TemplateError. `arguments` are further template variables (`enable_thinking`, …)."""
        template = self._choose(has_tools=tools is not None)
        return template.render(self._variables(messages, tools, add_generation_prompt, arguments))

    def render_bounded(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Render like `render`, but raise TooMuchWork if it might take long."""
        template = self._choose(has_tools=tools is not None)
        return template.render_bounded(self._variables(messages, tools, add_generation_prompt, arguments))

    def _variables(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            **(arguments or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _choose(self, *, has_tools: bool) -> "_CompiledTemplate":
        if not self._templates:
            raise TemplateError(self._complaint)
        if has_tools and TOOL_USE_NAME in self._templates:
            return self._templates[TOOL_USE_NAME]
        return self._templates.get(DEFAULT_NAME) or next(iter(self._templates.values()))


class _CompiledTemplate:
    def __init__(self, source: str, trial: TemplateTrial, clock: Clock) -> None:
        self.trial = trial
        self._reference = compile_reference(source, clock)
        self._fast = compile_fast(source, clock) if trial.engine == MINIJINJA else None

    def render_bounded(self, variables: Mapping[str, Any]) -> str:
        if self._fast is None or not self.trial.is_bounded:
            raise TooMuchWork
        try:
            text = self._by_fast(self._fast, self._read(variables), fuel=FUEL)
        except TemplateRefusal as error:
            raise _refused(str(error)) from error
        except FAST_FAILURES as error:
            raise TooMuchWork from error
        if text is None:
            raise TooMuchWork
        return text

    def render(self, variables: Mapping[str, Any]) -> str:
        variables = self._read(variables)
        text = None
        if self._fast is not None:
            with contextlib.suppress(*FAST_FAILURES):  # the reference has the last word, and better sentences
                text = self._by_fast(self._fast, variables)
        if text is not None:
            return text
        try:
            return self._reference(variables)
        except jinja2.TemplateError as error:
            raise _refused(error.message) from error
        except REFERENCE_FAILURES as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error

    def _by_fast(
        self, fast: FastEngine, variables: Mapping[str, Any], *, fuel: int | None = None
    ) -> str | None:
        """None where the reference may write something else."""
        watch = None
        if may_have_odd_values(variables):
            watch = Watch()
            variables = {name: watch.over(value) for name, value in variables.items()}
        text = fast.render(variables, watch, fuel=fuel)
        if watch is not None and watch.has_seen:
            return None
        minded = self.trial.minded_characters
        return None if minded and any(one in text for one in minded) else text

    def _read(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        messages = self.trial.content_form.of_messages(variables["messages"])
        return variables if messages is variables["messages"] else {**variables, "messages": messages}


def _refused(message: str | None) -> TemplateError:
    return TemplateError(f"the chat template refused these messages: {message}")


def _try_out(source: str, special_tokens: Mapping[str, str]) -> TemplateTrial:
    form = content_form(source, special_tokens)
    if compile_fast(source, datetime.now) is None or not render_alike(source, special_tokens, form):
        return TemplateTrial(JINJA2, is_bounded=False, content_form=form)
    return TemplateTrial(MINIJINJA, is_bounded(source), form, minded_by(source))


def _tokenizer_config(bundle: TokenizerBundle) -> Mapping[str, Any]:
    source = bundle.files.get("tokenizer_config.json", b"{}")
    try:
        config = json.loads(source)
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _tag(sources: Mapping[str, str]) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for name, source in sources.items():
        for text in (name, source):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


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
