"""FirstReplica: requests for a model without a ready replica wait here until one comes.

Owns the waiting requests and their bounds, in number and memory by `FairQueue`, in time by `wait_seconds`. It
is for fleets that go down to zero: an autoscaler sees how many wait, and starts a replica. Knows no body.

    a replica is ready                    the request does not come here
    the model was never registered        it is unknown, as without waiting
    a replica is ready at last            all that wait go on, in fair order over tenants
    none in time, or too many wait        refused; of too many, the tenant with most of them loses its last
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from replicas.protocol.status import ReplicaId
from router.caller import Tenant
from router.errors import NoReplicaAvailable
from router.queue.fair_queue import FairQueue
from router.queue.line import Waiter
from router.queue.work import BYTES_PER_TOKEN

LONGEST_RETRY_SECONDS = 60.0


class _Waiting(Waiter):
    __slots__ = ("called", "is_out")

    def __init__(self, model: str, tenant: Tenant, num_tokens: int, order: int) -> None:
        super().__init__(
            ReplicaId(model),  # a line for each model
            tenant.name,
            work=num_tokens,
            order=order,
            since=time.monotonic(),
            weight=tenant.weight,
            num_bytes=num_tokens * BYTES_PER_TOKEN,
        )
        self.called: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True where a replica has come, False where another request took the place."""
        self.is_out = False

    def call(self, *, has_come: bool) -> None:
        self.is_out = True
        if not self.called.done():  # else its client has just gone
            self.called.set_result(has_come)


class FirstReplica:
    """For one event loop. `has_ready` says whether a model has a ready replica; `registered` are the models
    that ever had one."""

    def __init__(
        self,
        wait_seconds: float,
        queue: FairQueue,
        *,
        has_ready: Callable[[str], bool],
        registered: Callable[[], Collection[str]],
    ) -> None:
        self._wait_seconds = wait_seconds
        self._queue = queue
        self.has_ready = has_ready
        self.registered = registered
        self._waiting: dict[str, int] = {}
        self._num_asked = 0

    @property
    def waiting_by_model(self) -> Mapping[str, tuple[int, int]]:
        """How many wait for each model, and the memory that their prompts will take. Models without a replica
        are there too, since an autoscaler looks at them before anything waits."""
        return {
            model: (len(found), sum(waiter.num_bytes for waiter in found))
            for model in {*self.registered(), *self._waiting}
            for found in (self._queue.in_line(ReplicaId(model)),)
        }

    async def wait(
        self, model: str, tenant: Tenant, num_tokens: int, longest_seconds: float | None = None
    ) -> None:
        """Return once the model has a ready replica, at once if it has. `num_tokens` of the prompt may be a
        guess. Raises NoReplicaAvailable. Safe to cancel."""
        if self.has_ready(model):
            return
        seconds = min(self._wait_seconds, self._wait_seconds if longest_seconds is None else longest_seconds)
        self._num_asked += 1
        waiter = _Waiting(model, tenant, num_tokens, self._num_asked)
        lost = self._queue.enter(waiter)
        if lost is None:
            raise self._refusal(model, "too many requests wait for one")
        self._waiting[model] = self._waiting.get(model, 0) + 1
        for each in lost:
            assert isinstance(each, _Waiting)
            each.call(has_come=False)
        try:
            async with asyncio.timeout(seconds):
                if not await waiter.called:
                    raise self._refusal(model, "too many requests of this tenant wait for one")
        except TimeoutError:
            raise self._refusal(model, f"none came within {seconds:g} s") from None
        finally:
            self._leave(model, waiter)

    def look(self, model: str) -> None:
        """Call those that wait for this model, if it has a ready replica."""
        if model not in self._waiting or not self.has_ready(model):
            return
        while (waiter := self._queue.next(ReplicaId(model))) is not None:
            assert isinstance(waiter, _Waiting)
            self._queue.goes(waiter)
            waiter.call(has_come=True)

    def _leave(self, model: str, waiter: _Waiting) -> None:
        if not waiter.is_out:
            self._queue.leave(waiter)
        self._waiting[model] -= 1
        if not self._waiting[model]:
            del self._waiting[model]

    def _refusal(self, model: str, reason: str) -> NoReplicaAvailable:
        return NoReplicaAvailable(
            f"No replica of model {model} is available: {reason}. Try again later.",
            retry_after_seconds=min(LONGEST_RETRY_SECONDS, max(1.0, self._wait_seconds)),
        )
