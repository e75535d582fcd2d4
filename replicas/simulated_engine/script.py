"""Script: a simulated engine's answers to prompts with certain words.

Owns the rules and the choice among them. Reads no file; the tokenizer is the model's own.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import tokenizers

MAX_BYTES = 4 * 2**20
MAX_RULES = 1000


class ScriptError(ValueError):
    """A script is invalid. The message is one sentence for its author."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """If `when` is the last of all rules' in the prompt's text, `say` is the answer."""

    when: Annotated[str, msgspec.Meta(min_length=1)]
    say: str


class Script:
    """The rules of one model. Special tokens are written in a rule as in the tokenizer."""

    def __init__(
        self, rules: Sequence[Rule], tokenizer: tokenizers.Tokenizer, end: int, vocab_size: int
    ) -> None:
        """`end` is the token that ends an answer. Raises ScriptError."""
        self._tokenizer = tokenizer
        self._end = end
        self._answers: dict[str, Sequence[int]] = {}
        for rule in rules:
            if rule.when in self._answers:
                raise ScriptError(f'two rules have the same "when": {rule.when[:100]!r}')
            token_ids = tokenizer.encode(rule.say, add_special_tokens=False).ids
            if token_ids and max(token_ids) >= vocab_size:
                raise ScriptError(f"the model has no token {max(token_ids)}, which {rule.say[:100]!r} needs")
            self._answers[rule.when] = token_ids

    @property
    def end(self) -> int:
        return self._end

    def answer(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """Return the answer's tokens without the one that ends it, or None if no rule's words are in the
        prompt.

        Of words that end at the same place, the longer are meant.
        """
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        found = [(at + len(when), len(when), when) for when in self._answers if (at := text.rfind(when)) >= 0]
        return self._answers[max(found)[-1]] if found else None


def read_rules(text: bytes) -> list[Rule]:
    """Raises ScriptError."""
    if len(text) > MAX_BYTES:
        raise ScriptError(f"it is longer than {MAX_BYTES} bytes")
    try:
        rules = msgspec.json.decode(text, type=list[Rule])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScriptError(f'it is no list of {{"when": text, "say": text}}: {error}') from error
    if not 1 <= len(rules) <= MAX_RULES:
        raise ScriptError(f"it has {len(rules)} rules, and must have 1 to {MAX_RULES}")
    return rules
