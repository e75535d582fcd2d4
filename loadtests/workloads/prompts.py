"""The prompts of a workload as request bodies: the same prefix id gives the same tokens, and no other does.

Owns what stands for a prefix id. Pure and seeded. A prompt is token ids where the server says what its
tokens are, else words of about one token each.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtests.workloads import TraceRequest

SAMPLE_WORDS = (
    "cache block prefix replica router prompt token answer question engine memory the of to and in for "
    "with that this when which holds keeps reads writes sends finds waits serves long short first last next "
    "same other shared private recent old new fast slow large small one two three four five six seven eight"
).split()
FEWEST_TOKENS = 16
CACHED_BLOCKS = 16384
"""Blocks whose JSON is kept: some 50 MB at 512 tokens each."""


@dataclass(slots=True)
class Prompts:
    """Makes bodies. `alphabet` are token ids, or words where the server takes no ids."""

    model: str
    block_tokens: int
    seed: int
    alphabet: Sequence[int] | Sequence[str]
    _blocks: dict[tuple[int, int], str] = field(default_factory=dict)

    def body(self, request: TraceRequest) -> bytes:
        """Return a streamed completion of exactly the trace's output length, where the server can do that."""
        left = request.num_input_tokens
        blocks = []
        for prefix_id in request.prefix_ids:
            blocks.append(self._block(prefix_id, min(left, self.block_tokens)))
            left -= self.block_tokens
        options: dict[str, object] = {
            "model": self.model,
            "max_tokens": request.num_output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": request.user,
        }
        if request.prompt_cache_key is not None:
            options["prompt_cache_key"] = request.prompt_cache_key
        is_text = isinstance(self.alphabet[0], str)
        prompt = '"' + " ".join(blocks) + '"' if is_text else "[" + ",".join(blocks) + "]"
        return f'{json.dumps(options)[:-1]}, "prompt": {prompt}}}'.encode()

    def _block(self, prefix_id: int, num_tokens: int) -> str:
        """Return a block's tokens as they stand in JSON, the same in every process that has the same seed."""
        key = (prefix_id, num_tokens)
        block = self._blocks.get(key)
        if block is None:
            digest = hashlib.blake2b(f"{self.seed}:{prefix_id}".encode(), digest_size=16).digest()
            chosen = random.Random(digest).choices(self.alphabet, k=num_tokens)
            block = (" " if isinstance(chosen[0], str) else ",").join(map(str, chosen))
            if len(self._blocks) >= CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[key] = block
        return block


def token_alphabet(tokenize: Callable[[str], Sequence[int]]) -> list[int]:
    """Ids that certainly exist and are not special: those that plain words are made of.

    Raises ValueError if there are too few to tell blocks apart.
    """
    token_ids = sorted(set(tokenize(" ".join(SAMPLE_WORDS))))
    if len(token_ids) < FEWEST_TOKENS:
        raise ValueError(f"{len(SAMPLE_WORDS)} words have only {len(token_ids)} different tokens")
    return token_ids
