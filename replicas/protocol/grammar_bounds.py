"""What bounds a grammar that an answer is held to: its length, and what following it may take.

Owns the numbers, which are llguidance's `LLParserLimits` by name: a router refuses by the same ones as the
engine that would follow the grammar.
"""

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
"""With these the worst schemas and regular expressions known take a second or two to work out, some tens of
milliseconds for each token, and 10 MiB."""
