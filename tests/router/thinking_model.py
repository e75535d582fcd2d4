"""The tiny model with a template of Qwen3's manner: its answers have reasoning and tool calls."""

import functools

from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.chat_templates import QWEN_3

MODEL = tiny_model.MODEL
CONTEXT_LENGTH = 4096
THINKS = "<think>\nShe wants the weather.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Århus"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@functools.cache
def catalog() -> ModelCatalog:
    made = ModelCatalog(tiny_model.SECRET)
    made.add(tiny_model.card(context_length=CONTEXT_LENGTH), tiny_model.bundle(QWEN_3))
    return made


def token_ids(text: str, *, end: bool = True) -> list[int]:
    """What the model makes when it says this, and ends its turn."""
    return catalog().get(MODEL).tokenizer.encode(text) + [tiny_model.END_OF_TURN] * end
