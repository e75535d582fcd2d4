"""Workloads dealt to tenants, and one of these that floods.

Owns how sessions are dealt, and what a flood is. Tenants share no prefixes with each other.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

from loadtests.workloads.workload import TraceRequest, Workload, by_arrival


def tenant_name(number: int) -> str:
    return f"tenant-{number}"


FLOODER = tenant_name(0)


def with_tenants(workload: Workload, num_tenants: int, flood: int = 1) -> Workload:
    """Deal the sessions to `num_tenants` tenants in turn; the first sends each of its own `flood` times.

    The copies are other sessions, spread over the same time, with prefixes of their own.
    """
    numbers: dict[str, int] = {}
    for request in workload.requests:
        numbers.setdefault(request.session, len(numbers) % num_tenants)
    duration = workload.duration_seconds
    requests: list[TraceRequest] = []
    for request in workload.requests:
        tenant = tenant_name(numbers[request.session])
        copies = flood if tenant == FLOODER else 1
        requests += _copies(request, tenant, copies, duration)
    return replace(workload, requests=by_arrival(requests))


def _copies(request: TraceRequest, tenant: str, count: int, duration: float) -> Iterator[TraceRequest]:
    for copy in range(count):
        arrival = request.arrival_seconds + copy * duration / count
        world = f"{tenant}/{copy}"
        yield replace(
            request,
            arrival_seconds=arrival - duration if arrival > duration else arrival,
            prefix_ids=tuple(_id_in(world, each) for each in request.prefix_ids),
            user=f"{world}/{request.user}",
            session=f"{world}/{request.session}",
            tenant=tenant,
            images=tuple(replace(each, content=f"{world}/{each.content}") for each in request.images),
        )


def _id_in(world: str, prefix_id: int) -> int:
    return int.from_bytes(blake2b(f"{world}/{prefix_id}".encode(), digest_size=8).digest(), "big")
