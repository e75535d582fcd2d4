"""Following: chunks of a split on their way to the decoder, while the prefiller computes those behind them.

Owns which chunks have moved, and whether more will. Knows no steps: the fleet says when to look again.
"""

from collections.abc import Callable

from loadtests.simulation.request import VirtualRequest
from loadtests.simulation.store import VirtualStore
from replicas.kvstore.chunk import ChunkName
from router.routing.table import RoutedRequest


class Following:
    """From one store to another; `moved` is called when KV has begun to move, and when no more will."""

    def __init__(
        self,
        first_part: VirtualRequest,
        prefill: RoutedRequest,
        routed: RoutedRequest,
        source: VirtualStore,
        target: VirtualStore,
        moved: Callable[[], None],
    ) -> None:
        decision = routed.decision
        assert decision.split is not None
        self.first_part = first_part
        self.prefill = prefill
        self.source = source
        self.num_tokens = decision.overlap_tokens
        self.wait_seconds = decision.split.wait_seconds
        self.is_over = False
        self._target = target
        self._moved = moved
        self._left: list[ChunkName] = []
        self._is_computed = False

    def begin(self, names: list[ChunkName], now: float) -> None:
        """Let the decoder wait for these."""
        self._left = names
        self.go_on(now)

    def computed(self, now: float) -> None:
        """Note that the prompt is computed. Chunks that have not begun to be copied by then will not come."""
        self._is_computed = True
        self.go_on(now)

    def go_on(self, now: float) -> None:
        if self.is_over:
            return
        num_before = len(self._left)
        self._left = self._left[self._target.pull_next(self._left, self.source, now) :]
        is_lost = self._is_computed and self._left and not self.source.has(self._left[0])
        if not self._left or is_lost:
            self.end()
        elif len(self._left) < num_before:
            self._moved()

    def end(self) -> None:
        """No more will come."""
        self.is_over = True
        self._moved()
