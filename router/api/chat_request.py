"""ChatRequest: one conversation to continue, in no dialect's words.

Owns what every dialect's body is turned into before anything else is done with it. Plain data, which travels
to the process that prepares large bodies and back.
"""

from typing import Any

from msgspec import Struct, field

from router.answers.wishes import OutputFormat, ToolChoice
from router.api.sampling import GenerationFields
from router.prompt.images import SentImage


class KeepThrough(Struct, frozen=True, array_like=True):
    """A request to keep the prompt through message `message` for `seconds` after each use; -1 means all
    before the messages, None the whole prompt. With `num_characters` it covers only that much of the
    message's text."""

    seconds: int
    message: int | None = None
    num_characters: int | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """Its fields of sampling have been checked, under the names that its client knows them by.

    `messages` are as chat templates expect them: `role`, `content` (a text; with `images` in it a list of
    parts, `{"type": "text", "text"}` and `{"type": "image"}`), and where there are any
    `tool_calls` (`{"id", "type": "function", "function": {"name", "arguments": object}}`), `tool_call_id`,
    `name`, `reasoning_content`. `tools` are `{"type": "function", "function": {"name", "description",
    "parameters"}}`. `answers` is where the dialect keeps what its answers repeat of the question.
    """

    messages: list[dict[str, Any]]
    images: list[SentImage] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    output_format: OutputFormat | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    num_logprobs: int | None = None
    keeps: list[KeepThrough] = field(default_factory=list)
    cut_to_context: bool = False
    """`max_tokens` is a bound and no more: an answer may also end where the context does."""
    only_prompt: bool = False
    """Compute and keep the prompt; nothing is to be answered."""
    messages_field: str = "messages"
    """The client's name for them."""
    tool_parameter: str = "tools[{}].function.parameters"
    """Path of a tool's argument schema in the client's body, by its number."""
    unknown_fields: list[str] = field(default_factory=list)
    """Fields of the body that are neither honoured nor refused nor hints."""
    answers: Any = None
    compared_id: str | None = None
    """The earlier answer that the client wants its prompt to be compared with."""
