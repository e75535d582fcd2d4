"""OverdueWatch: moves requests away from replicas that are alive and get nowhere.

A second net: a replica's own watchdog ends an engine that hangs. Owns the looks at every replica with
requests in flight. To a generation its attempt is lost then, and it goes elsewhere.
"""

import asyncio
import logging
from weakref import WeakKeyDictionary

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.progress_monitor import ProgressMonitor
from router.fleet.inflight import ReplicaLost
from router.fleet.replica_client import ReplicaClient

logger = logging.getLogger(__name__)

LOOKS = 12
"""How often to look within the time after which something is overdue."""


class OverdueWatch:
    """`run()` as a task of the owner's."""

    def __init__(self, dispatcher: Dispatcher, seconds: float) -> None:
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._pulses: WeakKeyDictionary[ReplicaClient, ProgressMonitor] = WeakKeyDictionary()
        self._hanging: WeakKeyDictionary[ReplicaClient, float] = WeakKeyDictionary()
        """Since when."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / LOOKS)
            self.look()

    def look(self) -> None:
        """At every replica once."""
        for client in self._dispatcher.streams():
            if client.lost is None:
                self._look_at(client)

    def _look_at(self, client: ReplicaClient) -> None:
        dispatcher, table = self._dispatcher, self._dispatcher.table
        latest = table.loads.latest(client.replica_id)
        if latest is None:
            return
        attempts = {attempt.inflight.submit_id: attempt for attempt in dispatcher.attempts_at(client)}
        tokens = {number: attempt.inflight.num_tokens for number, attempt in attempts.items()}
        pulse = self._pulses.get(client)
        if pulse is None:
            card = table.card(client.replica_id)
            relays = card is not None and bool(card.takes_bodies)
            pulse = self._pulses[client] = ProgressMonitor(self._seconds, relays=relays)
        hangs, overdue = pulse.look(latest[0], client.num_deltas, tokens, dispatcher.clock())
        if hangs:
            self._begin_hanging(client, len(overdue))
        elif client in self._hanging and (
            pulse.has_moved or dispatcher.clock() - self._hanging[client] >= self._seconds
        ):
            del self._hanging[client]
            table.set_stalled(client.replica_id, is_stalled=False)
            logger.info("replica %s gets requests again", client.replica_id)
        for number in overdue:
            dispatcher.num_overdue += 1
            attempts[number].inflight.fail(ReplicaLost("nothing has come of it for too long"))

    def _begin_hanging(self, client: ReplicaClient, num_overdue: int) -> None:
        logger.warning(
            "replica %s is alive but makes no progress; its requests move to others requests=%d",
            client.replica_id,
            num_overdue,
        )
        self._hanging[client] = self._dispatcher.clock()
        self._dispatcher.blame_those_at(client)
        self._dispatcher.table.set_stalled(client.replica_id, is_stalled=True)
