"""What API keys cost a router: bytes each, a lookup, and a reload beside its event loop.

`python -m loadtests.benches.keys [--tenants N] [--keys N] [--yaml]`. Beside the reload, a loop's delays are
held against those beside a thread that only counts, since both share the interpreter with it.
"""

import argparse
import asyncio
import gc
import hashlib
import random
import secrets
import time
import tracemalloc
from collections.abc import Callable

from router.tenants.caller import NO_LIMITS, Limits, Right, Tenant
from router.tenants.key_document import read_document, write_json, write_yaml
from router.tenants.key_record import RANDOM_BYTES, KeyDocument, KeyRecord, make_key
from router.tenants.keyring import Keyring
from router.tenants.keys_in_force import key_set

NUM_LOOKUPS = 20_000
TICK_SECONDS = 0.001


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--yaml", action="store_true", help="read it as YAML, too")
    arguments = parser.parse_args()
    document, texts = _document(arguments.tenants, arguments.keys)
    contents = {"JSON": write_json(document)}
    if arguments.yaml:
        contents["YAML"] = write_yaml(document)
    del document
    gc.collect()
    gc.freeze()
    for form, content in contents.items():
        seconds = _timed(lambda content=content: key_set(read_document(content)))  # type: ignore[misc]
        print(f"{form}: {len(content) / 2**20:.1f} MiB, read and made ready in {seconds:.2f} s")
    content = contents["JSON"]
    print(f"{_bytes_held(content) / arguments.keys:.0f} bytes a key, its share of the tenants included")
    keyring = key_set(read_document(content)).keyring
    strangers = [make_key(secrets.token_bytes(RANDOM_BYTES))[1] for _ in range(NUM_LOOKUPS)]
    for _ in range(3):
        known = _lookup_seconds(keyring, random.choices(texts, k=NUM_LOOKUPS))
        unknown = _lookup_seconds(keyring, strangers)
        print(
            f"lookup: {known * 1e6:.1f} µs of a key that is known, {unknown * 1e6:.1f} µs of one that is not"
        )
    for _ in range(3):
        _print_delays("reload", lambda: key_set(read_document(content)))
        _print_delays("counting", _count)
        _print_delays("letting go", key_set(read_document(content)).keyring.let_go)


def _document(num_tenants: int, num_keys: int) -> tuple[KeyDocument, list[str]]:
    """Every tenth tenant in a group, every fourth key with a limit."""
    names = [f"tenant-{number}" for number in range(num_tenants)]
    tenants = {
        name: Tenant(
            name=name,
            groups=("group",) if number % 10 == 0 else (),
            limits=Limits(requests_per_minute=60 + number),
        )
        for number, name in enumerate(names)
    }
    keys, texts = [], []
    for number in range(num_keys):
        key_id, text = make_key(secrets.token_bytes(RANDOM_BYTES))
        record = KeyRecord(
            key_id=key_id,
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            tenant=names[number % num_tenants],
            name=f"laptop of user {number}",
            rights=frozenset({Right.EXPLAIN}) if number % 2 else frozenset(),
            limits=Limits(requests_per_minute=60) if number % 4 == 0 else NO_LIMITS,
        )
        keys.append(record)
        texts.append(text)
    return KeyDocument(tenants, tuple(keys)), texts


def _timed(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def _bytes_held(content: bytes) -> int:
    tracemalloc.start()
    held = key_set(read_document(content))
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del held
    return num_bytes


def _lookup_seconds(keyring: Keyring, texts: list[str]) -> float:
    now = time.time()
    return _timed(lambda: [keyring.find(text, now) for text in texts]) / len(texts)


def _print_delays(what: str, work: Callable[[], object]) -> None:
    delays, seconds = asyncio.run(_delays(work))
    delays.sort()
    p99, worst = delays[int(len(delays) * 0.99)], delays[-1]
    print(
        f"{what}: {seconds:.2f} s in a thread; the loop is late by {p99 * 1e3:.0f} ms (p99), "
        f"{worst * 1e3:.0f} ms at worst"
    )


def _count() -> None:
    for _ in range(50_000_000):
        pass


async def _delays(work: Callable[[], object]) -> tuple[list[float], float]:
    """How late the loop was, again and again, until the work in the thread had ended."""
    delays, started = [], time.perf_counter()
    working = asyncio.create_task(asyncio.to_thread(work))
    while not working.done():
        asked = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        delays.append(time.perf_counter() - asked - TICK_SECONDS)
    await working
    return delays, time.perf_counter() - started


if __name__ == "__main__":
    main()
