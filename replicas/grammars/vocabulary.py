"""A model's tokens as llguidance needs them: the bytes of each, and which ones end an answer.

Owns the reading of the tokenizer's files. It takes a second or two for 150,000 tokens.
"""

from collections.abc import Sequence

import tokenizers
from llguidance import LLTokenizer

from replicas.protocol.status import TokenizerBundle


class NoVocabulary(Exception):
    """llguidance cannot read the model's tokenizer. The message says why."""


def read_vocabulary(bundle: TokenizerBundle, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Raises NoVocabulary. `vocab_size` is the model's, which may have more ids than the tokenizer."""
    source = bundle.files.get("tokenizer.json")
    if source is None:
        raise NoVocabulary("there is no tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(source)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        num_ids = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        return LLTokenizer(
            tokenizer.to_str(),
            n_vocab=max(vocab_size, num_ids),
            eos_token=list(eos_token_ids) or None,
        )
    except ValueError as error:
        raise NoVocabulary(str(error)) from error
