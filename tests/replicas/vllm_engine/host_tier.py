"""A host memory tier for vLLM on a CPU, where vLLM itself offloads from GPUs only.

All but the copying is vLLM's. It is named to vLLM by its module path, as any tier from outside would be.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _Copier(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, and says so when it is asked next."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._pages = [
            (
                entry.tensor.view(torch.int8).view(-1, entry.page_size_bytes),
                region.create_next_worker_view(entry.page_size_bytes),
            )
            for entry in kv_caches.tensors
        ]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pages:
            host[dst_spec.block_ids] = device[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pages:
            device[dst_spec.block_ids] = host[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._pages.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _Copier(kv_caches, region)
        return self._worker
