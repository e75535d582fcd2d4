"""misfit(): whether the machines of a Ray cluster can hold a fleet, and if not, why.

Owns the packing: first-fit decreasing, which may miss a fit. It counts the machines' total resources, not the
free ones.
"""

from collections.abc import Collection, Mapping, Sequence

from cluster.config import FleetSpec, PoolSpec

Machine = Mapping[str, float]
"""One machine's resources by Ray's names: CPU, GPU, custom."""

ROUNDING = 1e-6


def misfit(
    spec: FleetSpec,
    machines: Sequence[Machine],
    *,
    rolling: Collection[str] = (),
    grown: Collection[str] = (),
) -> str | None:
    """Say in one sentence why the fleet does not fit; None if it does. `rolling` pools need room for one more
    replica; the sentence speaks of `grown` pools."""
    if spec.is_growing:
        return None
    for pool in spec.pools:
        if pool.num_replicas and _num_placed([(pool, 1)], machines)[pool.name] == 0:
            where = "no machine of the cluster can" if len(pool.bundles()) == 1 else "the cluster cannot"
            return f"{where} hold a replica of pool {pool.name}, which asks for {_demand(pool)}"
    wanted = [(pool, pool.num_replicas) for pool in spec.pools]
    placed = _num_placed(wanted, machines)
    if any(placed[pool.name] < count for pool, count in wanted):
        placed = _num_placed(wanted, machines, last=grown)
    for pool, count in wanted:
        if placed[pool.name] < count:
            return (
                f"the cluster cannot hold {count} replicas of pool {pool.name}: each asks for "
                f"{_demand(pool)}, and there is room for {placed[pool.name]}"
            )
    for name in rolling:
        more = [(pool, count + (pool.name == name and pool.surge > 0)) for pool, count in wanted]
        placed = _num_placed(more, machines)
        if any(placed[pool.name] < count for pool, count in more):
            return (
                f"there is no room for one more replica of pool {name} while it is rolled over; "
                "with surge 0 an old one leaves first"
            )
    return None


def _num_placed(
    wanted: Sequence[tuple[PoolSpec, int]], machines: Sequence[Machine], last: Collection[str] = ()
) -> dict[str, int]:
    """Count the replicas of each pool that find room."""
    room = [dict(machine) for machine in machines]
    placed = {pool.name: 0 for pool, _ in wanted}
    order = sorted(wanted, key=lambda item: _size(item[0]), reverse=True)
    for pool, count in sorted(order, key=lambda item: item[0].name in last):
        for _ in range(count):
            if not _place(pool, room):
                break
            placed[pool.name] += 1
    return placed


def _place(pool: PoolSpec, room: list[dict[str, float]]) -> bool:
    """Take a replica's bundles out of `room`: all or none."""
    taken: list[tuple[dict[str, float], dict[str, float]]] = []
    for bundle in pool.bundles():
        machine = next((machine for machine in room if fits(bundle, machine)), None)
        if machine is None:
            for other, earlier in taken:
                for name, amount in earlier.items():
                    other[name] += amount
            return False
        for name, amount in bundle.items():
            machine[name] -= amount
        taken.append((machine, bundle))
    return True


def fits(bundle: Mapping[str, float], machine: Machine) -> bool:
    """Whether the machine has that much in total, used or not."""
    return all(machine.get(name, 0.0) + ROUNDING >= amount for name, amount in bundle.items())


def _size(pool: PoolSpec) -> tuple[float, float, float]:
    largest = pool.bundles()[0]
    return (largest.get("GPU", 0.0), sum(pool.custom_resources.values()), largest.get("CPU", 0.0))


def _demand(pool: PoolSpec) -> str:
    bundles = pool.bundles()
    names = sorted({name for bundle in bundles for name in bundle})
    amounts = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
