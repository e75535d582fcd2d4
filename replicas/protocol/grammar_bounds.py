"""Bounds on a grammar: its length, and the work of following it.

The numbers are llguidance's `LLParserLimits` by name. Routers refuse by the same ones as the engine that
would follow the grammar. Owns the words for why llguidance cannot follow one.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

MAX_GRAMMAR_CHARACTERS = 2**20

PARSER_LIMITS: Mapping[str, int | bool] = MappingProxyType(
    {
        "max_items_in_row": 2_000,
        "initial_lexer_fuel": 1_000_000,
        "step_lexer_fuel": 200_000,
        "step_max_items": 50_000,
        "max_lexer_states": 50_000,
        "max_grammar_size": 50_000,
        "verbose_errors": False,
    }
)
"""With these the worst known schemas and regular expressions take some tens of milliseconds per token, 62 MiB
to compile, and 48 more for new states. They do not bound divisors, patterns that must all match, and names by
pattern, which can take any time to compile."""

_MAX_REASON_CHARACTERS = 300
_MAX_PATTERN_CHARACTERS = 100
_PLACE = re.compile(r"at \d+\(\d+\): ")


def why_not_followed(error: str) -> str:
    """Return llguidance's error on one line. For a pattern it first announces an error, then shows the
    pattern with a mark below, and gives the reason last."""
    first, _, rest = error.partition("\n")
    if not first.endswith(":"):
        return first[:_MAX_REASON_CHARACTERS]
    lines = [line.strip() for line in rest.split("\n")]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    if not reason:
        return " ".join([first, *filter(None, lines)])[:_MAX_REASON_CHARACTERS]
    place = _PLACE.match(first)
    pattern = (
        lines[0] if len(lines[0]) <= _MAX_PATTERN_CHARACTERS else f"{lines[0][:_MAX_PATTERN_CHARACTERS]}…"
    )
    what = first.rpartition(": ")[2]
    return f"{place[0] if place else ''}{what} {reason[:_MAX_REASON_CHARACTERS]}, in {pattern}"
