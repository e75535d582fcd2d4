"""A torch engine with host memory below its cache: real KV goes out and comes back, and nothing shows it."""

import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replicas.config import ReplicaConfig
from replicas.kvstore.arena import Arena, available_bytes
from replicas.process.settings import SettingsError
from replicas.scheduling.lower_tiers import Copy
from replicas.torch_engine.chunk_copies import ChunkCopier, _pin, payload_bytes
from replicas.torch_engine.engine import TorchEngine
from replicas.torch_engine.rows import KVBlocks
from tests.replicas.torch_engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.replicas.torch_engine.driving import DEVICE, Driver, greedy

MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("random-llama"), "llama")


def wait_for(copy: Copy) -> None:
    assert copy.is_done() or DEVICE.type == "cuda"
    while not copy.is_done():
        time.sleep(0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_copied_out_comes_back_bit_by_bit_wherever_it_goes(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    tensor = torch.randn((2, 3, 20, 4 * 2 * 8), dtype=torch.float32).to(DEVICE, dtype)
    blocks = KVBlocks(tensor, block_size=4, num_heads=4, num_kv_heads=2, head_dim=8)
    arena = Arena(3, payload_bytes(blocks, 4))
    copier = ChunkCopier(blocks, arena, 4)
    chains = [[7, 2, 19, 5], [1, 11, 3, 12]]
    before = tensor.clone()
    for slot, ids in ((2, chains[0]), (0, chains[1])):
        wait_for(copier.copy_out(ids, slot))
    tensor.zero_()
    # From the third block of the first chunk to the second of the next.
    wait_for(copier.copy_in([2, 0], 2, [4, 6, 8, 9]))
    for place, source in zip([4, 6, 8, 9], [19, 5, 1, 11], strict=True):
        assert torch.equal(tensor[:, :, place], before[:, :, source])
    untouched = [block for block in range(20) if block not in (4, 6, 8, 9)]
    assert not tensor[:, :, untouched].any()


def test_memory_that_cannot_be_page_locked_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [712, 0]
    cuda = SimpleNamespace(cudaHostRegister=lambda *_: answers.pop(0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    arena = Arena(2, 100)
    assert _pin(arena, DEVICE) is None
    assert "cannot be page-locked (CUDA error 712)" in caplog.text
    assert _pin(arena, DEVICE) == torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()


def test_answers_are_the_same_with_and_without_host_memory_in_a_storm(checkpoint: Path) -> None:
    rng = random.Random(5)
    sizes = {"block_size": 4, "num_blocks": 60, "context_length": 200}
    plain = Driver(checkpoint, **{**sizes, "num_blocks": 4000})
    tiered = Driver(
        checkpoint, **sizes, host_kv_bytes=MIB, chunk_tokens=16, index_stride=16, max_batched_tokens=48
    )
    tiered.always_load()
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(70)] for _ in range(5)]
    asked = []
    for _ in range(60):
        prompt = rng.choice(stems)[: rng.randrange(20, 71)] + [
            rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))
        ]
        num_tokens = rng.randrange(1, 20)
        key = tiered.add(prompt, greedy(num_tokens))
        if rng.random() < 0.2:
            tiered.step()
            tiered.engine.abort(key)
        else:
            asked.append((key, prompt, num_tokens))
        for _ in range(rng.randrange(6)):
            tiered.step()
    outcomes = tiered.finish()
    slower = 0
    for key, prompt, num_tokens in asked:
        assert outcomes[key].token_ids == plain.generate(prompt, num_tokens).token_ids
        usage = outcomes[key].usage
        assert usage is not None
        slower += usage.num_slower_tier_tokens
    assert slower > 300
    assert tiered.num_restarts, "no request was preempted"
    load = tiered.engine.step().load
    assert load.num_used_blocks == load.num_waiting == 0
    assert load.host_seconds_per_token > 0


def test_without_host_memory_the_engine_has_no_tiers(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.generate(range(30), 3)
    load = driver.engine.step().load
    assert load.host_seconds_per_token == load.move_backlog_seconds == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_kv_bytes": 100}, "holds no chunk of 128 tokens"),
        ({"host_kv_bytes": 2**60}, "available here: lower host_kv_bytes"),
        ({"host_kv_bytes": MIB, "chunk_tokens": 100}, "chunk_tokens is a multiple of block_size, 8"),
        ({"host_kv_bytes": MIB, "chunk_tokens": 256}, "index_stride is a multiple of chunk_tokens, 256"),
        ({"host_kv_bytes": 0}, "host_kv_bytes must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(checkpoint: Path, settings: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        TorchEngine(
            ReplicaConfig(model=str(checkpoint), device="cpu", block_size=8, num_blocks=64, **settings)  # type: ignore[arg-type]
        )


def test_the_simulated_engine_has_no_host_memory() -> None:
    with pytest.raises(SettingsError, match="not for simulated"):
        ReplicaConfig(engine="simulated", host_kv_bytes=MIB)


def test_an_arena_is_memory_of_no_name_that_a_child_could_be_given(tmp_path: Path) -> None:
    arena = Arena(4, 5000)
    assert arena.slot_bytes == 4096 + 8192
    arena.payload(3)[:5] = b"hello"
    assert bytes(arena.slot(3)[4096:4101]) == b"hello"
    assert len(arena.payload(0)) == 5000
    link = Path(f"/proc/self/fd/{arena.fd}").readlink()
    assert "memfd:kvasir-kv" in str(link) and "deleted" in str(link)
    available = available_bytes()
    assert available is None or available > 0
    arena.close()
    arena.close()
