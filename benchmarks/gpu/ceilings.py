"""What the card gives at best: copying, float32 FMA, matrix products, the time of a launch; and what it is.

python -m benchmarks.gpu.ceilings
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

import torch

from benchmarks.gpu.part import Part, main
from benchmarks.gpu.timing import launch_seconds, seconds

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


def copying(part: Part) -> dict[str, Any]:
    num_bytes = 1 << (16 if part.dry else 30)
    source = torch.randn(num_bytes // 4, device=part.device)
    target = torch.empty_like(source)
    taken = seconds([lambda: target.copy_(source)], part.device, repeat=20)
    return {"bytes_per_s": 2 * num_bytes / taken}


def fma(part: Part) -> dict[str, Any]:
    if part.dry:
        return {"flop_per_s": 1e9}
    kernel = torch.cuda._compile_kernel(_FMA, "fma_chains")
    blocks, threads, rounds = torch.cuda.get_device_properties(0).multi_processor_count * 16, 256, 4096
    out = torch.empty(blocks * threads, device=part.device)

    def run() -> None:
        kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=[out, 0.999, 0.001, rounds])

    return {"flop_per_s": 2 * 16 * rounds * blocks * threads / seconds([run], part.device, repeat=10)}


def product(part: Part, dtype: torch.dtype, tf32: bool = False) -> dict[str, Any]:
    size = 64 if part.dry else 8192
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a, b = (torch.randn(size, size, device=part.device, dtype=dtype) for _ in range(2))
    taken = seconds([lambda: a @ b], part.device, repeat=10)
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"flop_per_s": 2 * size**3 / taken}


def launch(part: Part) -> dict[str, Any]:
    """The shortest kernel there is: what any launch takes."""
    one = torch.zeros(1, device=part.device)
    return {"seconds_a_call": launch_seconds(lambda: one.add_(1), part.device)}


def run(part: Part, options: argparse.Namespace) -> None:
    part.case("card", lambda: card(part))
    part.case("copy", lambda: copying(part))
    part.case("fma fp32", lambda: fma(part))
    part.case("matrix product bf16", lambda: product(part, torch.bfloat16))
    part.case("matrix product tf32", lambda: product(part, torch.float32, True))
    part.case("matrix product fp32", lambda: product(part, torch.float32))
    part.case("launch", lambda: launch(part))


if __name__ == "__main__":
    main(__doc__, run)
