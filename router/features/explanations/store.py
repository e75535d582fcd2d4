"""ExplanationStore: the explanations of a router's requests, beside what it remembers of their prompts.

Owns how they are found again. The memory bounds them.
"""

from collections.abc import Iterator

import msgspec

from router.explain.explanation import Explanation, compared, packed, unpacked
from router.explain.nearest import RememberedPrompt
from router.explain.prompt_memory import PromptMemory
from router.shared.instruments import Instrument, counter, gauge


class ExplanationStore:
    def __init__(self, memory: PromptMemory) -> None:
        self.memory = memory

    def instruments(self) -> Iterator[Instrument]:
        memory = self.memory
        yield gauge(
            "router_explain_bytes",
            "Memory of what is kept of requests to explain their cache misses",
            lambda: memory.num_bytes,
        )
        yield gauge(
            "router_explain_prompts",
            "Prompts that can be explained and compared with",
            lambda: memory.num_prompts,
        )
        yield counter(
            "router_explain_forgotten_total",
            "Prompts that made room for others and can be explained no more",
            lambda: memory.num_forgotten,
        )

    def put(self, tenant: str, prompt: RememberedPrompt, explanation: Explanation) -> None:
        """Keep the explanation of the request whose first prompt that is."""
        self.memory.tell(prompt, tenant, packed(explanation))

    def find(self, tenant: str, prompt_id: str) -> Explanation | None:
        """Return one of that tenant's, by the request's id or the answer's."""
        found = self.memory.find(tenant, prompt_id)
        if found is None or not found.explanation:
            return None
        explanation = unpacked(found.explanation)
        if found.is_compared or not explanation.prompts:
            return explanation
        first = compared(explanation.prompts[0], *self.memory.nearest_before(tenant, found))
        explanation = msgspec.structs.replace(explanation, prompts=(first, *explanation.prompts[1:]))
        found.is_compared = True
        self.put(tenant, found, explanation)
        return explanation
