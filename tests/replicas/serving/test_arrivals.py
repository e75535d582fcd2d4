"""What a replica tells of its load before its engine has counted a request."""

from replicas.protocol.frames import LoadSnapshot
from replicas.serving.arrivals import Arrivals


def test_an_engine_s_load_with_its_arrivals_counts_the_room_of_those() -> None:
    arrivals = Arrivals(LoadSnapshot(num_running=1, num_room_tokens=300))
    arrivals.add(1, num_requests=1, num_tokens=50, num_room_tokens=200)
    assert arrivals.load.num_room_tokens == 100
    arrivals.take(LoadSnapshot(), 1)
    assert arrivals.load.num_room_tokens is None
