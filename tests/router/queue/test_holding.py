"""What begins an overload of a model, and what does not."""

import pytest

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import Adapter, ReplicaId
from router.errors import NoReplicaAvailable
from router.queue.held import Asking, Held, QueueRules
from router.queue.holding import Holding
from router.routing.decision import RoutingRequest
from router.routing.table import RoutedRequest
from tests.router.routing.tables import BLOCK_SIZE, CARD, table_of

A = ReplicaId("r0")
BUSY = LoadSnapshot(num_running=1, num_pending_tokens=1000, prefill_seconds_per_token=1e-3)


def asking(adapter: Adapter | None = None) -> Asking:
    return Asking(CARD.name, "red", RoutingRequest(b"bucket", 100, BLOCK_SIZE), (), adapter)


@pytest.fixture
def holding() -> Holding:
    """A replica that is busy, and no overload."""
    table = table_of(1)
    table.update_load(A, BUSY)
    return Holding(table, QueueRules())


def ask_in_vain(holding: Holding, adapter: Adapter | None = None) -> None:
    with pytest.raises(NoReplicaAvailable):
        holding.ask(asking(adapter), 0.0, lambda: None)


def test_an_adapter_that_no_replica_has_ready_holds_no_other_request_back(holding: Holding) -> None:
    ask_in_vain(holding, Adapter("sql", "f1"))
    assert isinstance(holding.ask(asking(), 1.0, lambda: None), RoutedRequest)


def test_after_all_replicas_were_away_requests_are_held(holding: Holding) -> None:
    holding._table.set_stalled(A, is_stalled=True)
    ask_in_vain(holding)
    holding._table.set_stalled(A, is_stalled=False)
    assert isinstance(holding.ask(asking(), 1.0, lambda: None), Held)
