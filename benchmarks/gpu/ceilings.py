"""What the card gives at best: copying, float32 FMA, matrix products, the time of a launch; and what it is.

python -m benchmarks.gpu.ceilings
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

import torch

from benchmarks.gpu.part import Part, main
from benchmarks.gpu.timing import Timer

# Sixteen chains a thread hide the latency of an FMA; the sum keeps the compiler from leaving any out.
_FMA = """
extern "C" __global__ void fma_chains(float* out, double scale, double shift, int rounds) {
  const float a = scale, b = shift;
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = threadIdx.x + i;
#pragma unroll 8
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = fmaf(x[i], a, b);
  }
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += x[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def card(part: Part) -> dict[str, Any]:
    """What the figures are of."""
    if part.dry:
        return {"name": "none (dry run)", "tools": {}}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_GiB": round(properties.total_memory / 2**30, 1),
        "cache_MiB": round(properties.L2_cache_size / 2**20, 1),
        "shared_KiB_a_block": round(getattr(properties, "shared_memory_per_block_optin", 0) / 2**10),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "tools": {name: shutil.which(name) is not None for name in ("nvcc", "compute-sanitizer", "ncu", "cuobjdump")},
    }


def _driver() -> str:
    try:
        import subprocess

        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except Exception as error:
        return f"unknown: {error}"


def copying(timer: Timer) -> dict[str, Any]:
    num_bytes = 1 << (16 if timer.dry else 30)
    source = torch.randn(num_bytes // 4, device=timer.device)
    target = torch.empty_like(source)
    # Not copy_: in a graph that is a node of another kind than kernels are, which an H200 takes a third slower.
    taken = timer.seconds([lambda: torch.mul(source, 1.0, out=target)])
    return {"bytes_per_s": 2 * num_bytes / taken}


def fma(timer: Timer) -> dict[str, Any]:
    if timer.dry:
        return {"flop_per_s": 1e9}
    kernel = torch.cuda._compile_kernel(_FMA, "fma_chains")
    blocks, threads, rounds = torch.cuda.get_device_properties(0).multi_processor_count * 16, 256, 4096
    out = torch.empty(blocks * threads, device=timer.device)

    def run() -> None:
        kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=[out, 0.999, 0.001, rounds])

    return {"flop_per_s": 2 * 16 * rounds * blocks * threads / timer.seconds([run])}


def product(timer: Timer, dtype: torch.dtype, tf32: bool = False) -> dict[str, Any]:
    size = 64 if timer.dry else 8192
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a, b = (torch.randn(size, size, device=timer.device, dtype=dtype) for _ in range(2))
    taken = timer.seconds([lambda: a @ b])
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"flop_per_s": 2 * size**3 / taken}


def launch(timer: Timer) -> dict[str, Any]:
    """The shortest kernel there is: what any launch takes."""
    one = torch.zeros(1, device=timer.device)
    return {"seconds_a_call": timer.seconds([lambda: one.add_(1)])}


def run(part: Part, options: argparse.Namespace) -> None:
    timer = Timer(part.device)
    part.case("card", lambda: card(part))
    part.case("copy", lambda: timer.row(copying))
    part.case("fma fp32", lambda: timer.row(fma))
    part.case("matrix product bf16", lambda: timer.row(product, torch.bfloat16))
    part.case("matrix product tf32", lambda: timer.row(product, torch.float32, True))
    part.case("matrix product fp32", lambda: timer.row(product, torch.float32))
    part.case("launch", lambda: timer.row(launch))


if __name__ == "__main__":
    main(__doc__, run)
