"""A torch engine with host memory and a disk below its cache, on a disk that damages, loses and delays."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.on_disk.disk import Finished, Kind
from replicas.protocol.frames import RequestKey
from tests.replicas.torch_engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.replicas.torch_engine.driving import Driver, greedy

KIB = 2**10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("random-llama"), "llama")


def on_disk(checkpoint: Path, folder: Path) -> Driver:
    """24 KiB of KV are a chunk of 16 tokens: 20 of them in host memory, 400 on disk."""
    driver = Driver(
        checkpoint,
        block_size=4,
        num_blocks=60,
        context_length=200,
        max_batched_tokens=48,
        host_kv_bytes=20 * 16 * KIB,
        disk_kv_bytes=400 * 16 * KIB,
        disk_reserve_bytes=0,
        kv_folder=str(folder),
        chunk_tokens=16,
        index_stride=16,
    )
    driver.engine.begin(lambda: None)
    driver.always_load()
    assert driver.engine.store is not None
    while driver.engine.store.speeds().disk is None:
        time.sleep(0.001)
    return driver


def settle(driver: Driver) -> None:
    """Until nothing is written any more."""
    assert driver.engine.store is not None
    while driver.engine.store.look_again_seconds is not None:
        driver.step()
        time.sleep(0.001)


def storm(driver: Driver, plain: Driver, rng: random.Random, between: Callable[[], None]) -> int:
    """Prompts of five stems, some aborted; each answer against a plain engine's. Tokens read from disk."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(12)]
    asked: list[tuple[RequestKey, Sequence[int], int]] = []
    for _ in range(70):
        prompt = rng.choice(stems)[: rng.randrange(40, 101)] + [rng.randrange(VOCAB_SIZE) for _ in range(5)]
        num_tokens = rng.randrange(1, 12)
        key = driver.add(prompt, greedy(num_tokens))
        if rng.random() < 0.15:
            driver.step()
            driver.engine.abort(key)
        else:
            asked.append((key, prompt, num_tokens))
        for _ in range(rng.randrange(12)):
            driver.step()
        between()
    outcomes = driver.finish()
    num_read = 0
    for key, prompt, num_tokens in asked:
        assert outcomes[key].token_ids == plain.generate(prompt, num_tokens).token_ids
        usage = outcomes[key].usage
        assert usage is not None
        num_read += usage.num_disk_tokens
    load = driver.engine.step().load
    assert load.num_used_blocks == load.num_waiting == 0
    return num_read


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_and_lost_files_cost_time_and_never_a_token(
    checkpoint: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    driver = on_disk(checkpoint, tmp_path / "kv")
    plain = Driver(checkpoint, block_size=4, num_blocks=4000, context_length=200)
    num_harmed = 0

    def harm() -> None:
        nonlocal num_harmed
        files = sorted((tmp_path / "kv").rglob("*.kv"))
        for file in rng.sample(files, len(files) // 10):
            damage(file, rng)
            num_harmed += 1

    assert storm(driver, plain, rng, harm) > 0
    assert num_harmed > 20
    settle(driver)
    driver.engine.close()


def damage(file: Path, rng: random.Random) -> None:
    try:
        content = bytearray(file.read_bytes())
        if not content:
            return  # it was cut to nothing, and nobody has read it since
        match rng.randrange(3):
            case 0:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 1:
                del content[rng.randrange(len(content)) :]
            case 2:
                file.unlink()
                return
        file.write_bytes(content)
    except OSError:
        pass  # the replica has removed it meanwhile


def test_every_fifth_read_failing_and_some_late_cost_time_only(checkpoint: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    driver = on_disk(checkpoint, tmp_path / "kv")
    plain = Driver(checkpoint, block_size=4, num_blocks=4000, context_length=200)
    store = driver.engine.store
    assert store is not None and store._disk is not None
    take, late = store._disk.take_finished, list[Finished]()
    num_reads = 0

    def unreliable() -> list[Finished]:
        """Every fifth read fails; every seventh is overdue, and returns much later."""
        nonlocal num_reads
        finished = []
        for each in take():
            if each.kind is not Kind.READ:
                finished.append(each)
                continue
            num_reads += 1
            if num_reads % 5 == 0:
                finished.append(Finished(Kind.READ, each.job, each.key, ok=False, reason="io"))
            elif num_reads % 7 == 0:
                finished.append(Finished(Kind.OVERDUE, each.job, each.key, ok=False, reason="overdue"))
                late.append(Finished(Kind.RETURNED, each.job, each.key, ok=False))
            else:
                finished.append(each)
        if len(late) > 3:
            finished.append(late.pop(0))
        return finished

    store._disk.take_finished = unreliable  # type: ignore[method-assign]
    assert storm(driver, plain, rng, lambda: None) > 0
    assert num_reads > 20
    settle(driver)
    assert store.directory.num_quarantined == len(late)
    driver.engine.close()


def test_what_was_asked_for_last_is_on_disk_after_the_end(checkpoint: Path, tmp_path: Path) -> None:
    driver = on_disk(checkpoint, tmp_path / "kv")
    prompt = [number % VOCAB_SIZE for number in range(100)]
    answer = driver.generate(prompt, 8).token_ids
    driver.engine.close()
    again = on_disk(checkpoint, tmp_path / "kv")
    store = again.engine.store
    assert store is not None
    chunks = list(store.directory._chunks)
    assert [store.directory.place(key) for key in chunks] == [ChunkPlace.DISK] * 6
    outcome = again.generate(prompt, 8)
    assert outcome.token_ids == answer
    assert outcome.usage is not None and outcome.usage.num_disk_tokens == 96
    again.engine.close()


def test_forgetting_everything_removes_every_file(checkpoint: Path, tmp_path: Path) -> None:
    driver = on_disk(checkpoint, tmp_path / "kv")
    rng = random.Random(4)
    for _ in range(6):
        driver.generate([rng.randrange(VOCAB_SIZE) for _ in range(100)], 4)
    settle(driver)
    assert list((tmp_path / "kv").rglob("*.kv"))
    assert driver.engine.reset_prefix_cache()
    driver.engine.close()
    assert not list((tmp_path / "kv").rglob("*.kv"))
    again = on_disk(checkpoint, tmp_path / "kv")
    assert again.engine.store is not None and again.engine.store.directory.num_on_disk == 0
    again.engine.close()
