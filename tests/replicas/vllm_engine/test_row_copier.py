"""Rows between vLLM's pages and slots, bit by bit, and where vLLM's worker for accelerators finds them."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replicas.kvstore.arena import Arena
from replicas.kvstore.layout import HEADER_BYTES

pytestmark = pytest.mark.vllm

NUM_PAGES, NUM_SLOTS, BLOCKS = 24, 5, 4
PAGE_BYTES = (96, 64, 96)


@pytest.fixture
def copies(environment: None) -> Any:
    import torch

    from replicas.vllm_engine.row_copier import RowCopier

    rng = np.random.default_rng(1)
    layers = [
        torch.from_numpy(rng.integers(-128, 128, (NUM_PAGES, size), dtype=np.int8)) for size in PAGE_BYTES
    ]
    kv_caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=layer, page_size_bytes=layer.shape[1]) for layer in layers]
    )
    arena = Arena(NUM_SLOTS, BLOCKS * sum(PAGE_BYTES))
    failed: set[int] = set()
    loaded: list[int] = []
    copier = RowCopier(
        kv_caches, arena, BLOCKS, on_failed=failed.update, on_loaded=lambda num, _: loaded.append(num)
    )
    return SimpleNamespace(layers=layers, arena=arena, copier=copier, failed=failed, loaded=loaded)


def device(block_ids: list[int], first_block: int = 0) -> Any:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    return GPULoadStoreSpec(block_ids, [len(block_ids)], [first_block])


def host(slots: list[int]) -> Any:
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    return CPULoadStoreSpec(slots)


def test_what_is_copied_out_comes_back_wherever_it_goes_and_from_wherever_it_begins(copies: Any) -> None:
    rng = random.Random(2)
    for first in range(BLOCKS):
        out = rng.sample(range(NUM_PAGES), 2 * BLOCKS)
        slots = rng.sample(range(NUM_SLOTS), 2)
        before = [layer.clone() for layer in copies.layers]
        copies.copier.submit_store(1, device(out, 8 * BLOCKS), host(slots))
        back = rng.sample(range(NUM_PAGES), 2 * BLOCKS - first)
        for layer in copies.layers:
            layer[out] = 0
        changed = [layer.clone() for layer in copies.layers]
        copies.copier.submit_load(2, host(slots), device(back, 8 * BLOCKS + first))
        for layer, was, then in zip(copies.layers, before, changed, strict=True):
            assert (layer[back] == was[out[first:]]).all()
            others = [page for page in range(NUM_PAGES) if page not in back]
            assert (layer[others] == then[others]).all()
        assert [(each.job_id, each.success) for each in copies.copier.get_finished()] == [
            (1, True),
            (2, True),
        ]
        assert copies.loaded.pop() == len(back)
    assert not copies.failed and not copies.copier.get_finished()


def test_a_copy_that_fails_ends_like_any_other_and_its_slots_are_named(
    copies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert copies.copier.submit_store(1, device([NUM_PAGES] * 2 * BLOCKS), host([3, 1]))
    assert copies.failed == {1, 3}
    assert [each.success for each in copies.copier.get_finished()] == [True]
    assert "could not be copied" in caplog.text


def test_headers_are_left_to_the_disk(copies: Any) -> None:
    for slot in range(NUM_SLOTS):
        copies.arena.slot(slot)[:HEADER_BYTES] = b"\7" * HEADER_BYTES
    copies.copier.submit_store(1, device([*range(4 * BLOCKS)]), host([4, 0, 2, 1]))
    assert all(set(copies.arena.slot(slot)[:HEADER_BYTES]) == {7} for slot in range(NUM_SLOTS))


def test_on_accelerators_vllm_itself_copies_to_the_same_places(copies: Any) -> None:
    """A file that a replica on a CPU has written has its pages where one on a GPU looks for them."""
    import torch
    from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

    from replicas.vllm_engine.row_copier import _ArenaRegion

    region = _ArenaRegion(copies.arena)
    slots, pages = [3, 0], [5, 9, 1, 20, 7, 2, 11, 4]
    copies.copier.submit_store(1, device(pages), host(slots))
    start = torch.frombuffer(copies.arena.memory, dtype=torch.int8)
    for layer in copies.layers:
        view = region.create_next_worker_view(layer.shape[1] * BLOCKS)
        pointers = np.empty(len(pages) - 1, dtype=np.uint64)
        compute_sub_block_ptrs(np.array(slots), BLOCKS, pointers, view, skip_count=1)
        for page, pointer in zip(pages[1:], pointers, strict=True):
            at = int(pointer) - start.data_ptr()
            assert (start[at : at + layer.shape[1]] == layer[page]).all()
    assert region.total_size_bytes == NUM_SLOTS * copies.arena.slot_bytes == len(start)
