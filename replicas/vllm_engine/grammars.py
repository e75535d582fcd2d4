"""vLLM's requests under a grammar.

Replaces vLLM's own backends: without a tokenizer vLLM would refuse such requests, and it neither bounds a
grammar's cost nor knows resumed output. vLLM lets requests wait for their grammar, asks it for masks, and
reports the tokens. Imports vLLM.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from replicas.engine import EngineRequest
from replicas.grammars.constraint import ConstraintExhausted, ConstraintFailed
from replicas.grammars.holding import GrammarHolder, HeldChoice


class HeldGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """vLLM's view of a choice that follows a grammar. `failure` is set once it cannot be followed further."""

    def __init__(self, holder: GrammarHolder, choice: HeldChoice) -> None:
        self._holder = holder
        self._choice = choice
        self.failure: ConstraintFailed | ConstraintExhausted | None = None
        self.is_complete = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """False ends the request as one that has failed."""
        try:
            for token in tokens:
                self.is_complete = self._choice.consume(token)
        except (ConstraintFailed, ConstraintExhausted) as failed:
            self.failure = failed
        return self.failure is None

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        row = bitmask[batch_index].numpy()
        row[:] = self._holder.masks([self._choice])[0, : len(row)]

    def is_terminated(self) -> bool:
        """Never before the request itself: a mask is always there to be asked for."""
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        matcher = self._choice.matcher
        return [] if matcher.is_complete else tokens[: matcher.inner.validate_tokens(tokens)]

    def rollback(self, num_tokens: int) -> None:
        self._choice.matcher.rollback(num_tokens)
        self.is_complete = self._choice.matcher.is_complete

    def reset(self) -> None:
        raise NotImplementedError("a choice is in its grammar only once")


class _Masks(StructuredOutputBackend):  # type: ignore[misc]
    """Makes room for masks of `vocab_size` tokens; grammars come from elsewhere."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.from_numpy(np.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=np.int32))

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: Any = None) -> Any:
        raise NotImplementedError("vLLM is not given grammars")

    def destroy(self) -> None:
        pass


class HeldRequests:
    """The requests of one engine that wait for their grammar."""

    def __init__(self, holder: GrammarHolder, structured_output_manager: Any, vocab_size: int) -> None:
        self._holder = holder
        self._waiting: dict[str, tuple[HeldChoice, Any]] = {}
        structured_output_manager.backend = _Masks(vocab_size)

    def begin(self, request: EngineRequest) -> HeldChoice | None:
        """Raises RequestRefused. None for a request without a grammar."""
        return self._holder.begin(request) if request.sampling.grammar else None

    def await_grammar(self, name: str, choice: HeldChoice, inner: Any) -> None:
        """vLLM's scheduler passes the request over until it has its grammar."""
        inner.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(grammar="held"))
        inner.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self._waiting[name] = choice, inner

    def forget(self, name: str) -> None:
        self._waiting.pop(name, None)

    def settle(self) -> Iterator[tuple[str, HeldGrammar | ConstraintFailed | ConstraintExhausted]]:
        """Yield the requests whose grammar is ready or failed."""
        for name, (choice, inner) in list(self._waiting.items()):
            try:
                if not choice.is_ready():
                    continue
            except (ConstraintFailed, ConstraintExhausted) as failed:
                del self._waiting[name]
                yield name, failed
            else:
                del self._waiting[name]
                grammar = HeldGrammar(self._holder, choice)
                inner.structured_output_request.grammar = grammar
                yield name, grammar
