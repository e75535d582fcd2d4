"""The GrammarHolder of an engine, made from its model's files."""

import time

from replicas.grammars.holding import GrammarHolder
from replicas.grammars.vocabulary import read_vocabulary
from replicas.protocol.status import ModelCard, TokenizerBundle


def open_holder(bundle: TokenizerBundle, card: ModelCard, seconds: float) -> GrammarHolder:
    """A choice waits at most `seconds` for its grammar. The files are read when the first one does."""
    return GrammarHolder(
        lambda: read_vocabulary(bundle, card.vocab_size, card.eos_token_ids),
        card.eos_token_ids,
        seconds=seconds,
        clock=time.monotonic,
    )
