"""ReplicaShape: the size and the habits of a simulated replica.

Owns what they are called. Does not know what a replica does with them.
"""

from dataclasses import dataclass

from replicas.simulated_engine.hardware import CostModel


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What one replica can do. `num_blocks` do not count the null block.

    With `decodes_beside`, prefill and decode do not slow each other down: requests decode at their own
    pace while a prompt is computed. Published comparisons of routers are often computed so; an engine
    whose steps do both is slower. With `reads_shared_once`, a block that several requests attend to is
    read once per decode step, not once for each of them. Without `counts_arrivals`, its load counts a
    request only from the end of the step that follows its arrival.
    """

    cost: CostModel
    num_blocks: int
    block_size: int
    max_batched_tokens: int
    max_running: int
    decodes_beside: bool = False
    reads_shared_once: bool = False
    counts_arrivals: bool = True

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size
