import asyncio
import threading

import pytest

from cluster.config import FleetSpec
from cluster.local import fleet_watch
from cluster.local.fleet_watch import FleetWatch


async def test_a_watch_that_is_cancelled_has_left_ray_before_ray_is_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, may_return, left = threading.Event(), threading.Event(), threading.Event()

    def create(spec: FleetSpec) -> None:
        entered.set()
        may_return.wait()
        left.set()

    monkeypatch.setattr(fleet_watch, "_find_or_create", create)
    keeping = asyncio.create_task(FleetWatch(FleetSpec(()), lambda view: None).keep(lambda text: None))
    await asyncio.to_thread(entered.wait)
    keeping.cancel()
    asyncio.get_running_loop().call_later(0.05, may_return.set)
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert left.is_set()
