"""A device's identity and limits, by torch: matrix products, copies, free memory.

Owns how work on a device is timed.
"""

import time
from collections.abc import Callable

import psutil
import torch

from loadtests.bench_gpu.model_work import DeviceLimits


def wait_for(device: torch.device) -> None:
    """Wait for a GPU's queue; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(device: torch.device, call: Callable[[], object], num_calls: int) -> float:
    """On a GPU by events in its own queue, so that the time to fill the queue does not count."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / num_calls
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - started) / num_calls


def measure_limits(device: torch.device, dtype: torch.dtype) -> tuple[DeviceLimits, str]:
    """The best of several rounds each, over random numbers; and a line that says what was done."""
    on_gpu = device.type == "cuda"
    size, num_bytes, num_calls = (8192, 2**30, 20) if on_gpu else (1024, 2**26, 1)

    def best(call: Callable[[], object]) -> float:
        seconds_per_call(device, call, num_calls)
        return min(seconds_per_call(device, call, num_calls) for _ in range(5))

    left, right = (torch.randn((size, size), device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    flops_per_second = 2 * size**3 / best(lambda: torch.mm(left, right, out=product))
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    bytes_per_second = 2 * num_bytes / best(lambda: target.copy_(source))
    line = (
        f"limits: {flops_per_second / 1e12:,.2f} TFLOP/s in a product of {size} x {size} matrices, "
        f"{bytes_per_second / 1e9:,.1f} GB/s read and written in a copy of {num_bytes // 2**20} MiB"
    )
    return DeviceLimits(flops_per_second, bytes_per_second), line


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
