"""The tokenizer of a model's text files."""

import tokenizers

from replicas.checkpoints.model_config import CheckpointError
from replicas.protocol.status import TokenizerBundle


def read_tokenizer(bundle: TokenizerBundle) -> tokenizers.Tokenizer | None:
    """Return the bundle's fast tokenizer, if it has one. Raises CheckpointError."""
    source = bundle.files.get("tokenizer.json")
    if source is None:
        return None
    try:
        return tokenizers.Tokenizer.from_buffer(source)
    except ValueError as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error


def num_ids(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the highest id: ids may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
