"""Two and four ranks on the one card: what moves bytes, cut networks, graphs, deadlines. Correctness only, no times.

python -m benchmarks.gpu.ranks [--dry-run]

Ranks that share a card are sliced in time, so nothing here tells how fast they would be on cards of their own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from benchmarks.gpu import rank_bodies
from benchmarks.gpu.part import Part, main
from torchtp.testing import run_ranks, timeout_scale

# For several ranks on one card; rank_bodies.start adds a host of its own for each rank.
ONE_CARD = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "TORCHTP_EXCHANGE_TIMEOUT": "15",  # seconds: a hang becomes an error in time
}


def on_ranks(size: int, body: Callable[..., dict[str, Any]], *args: Any, timeout: float = 35.0) -> dict[str, Any]:
    """What rank 0 found; raises with the tracebacks of all that failed."""
    results = run_ranks(body, size, *args, backend="torchtp", timeout=timeout)
    return {"ranks": size, **results[0]}


def run(part: Part, options: argparse.Namespace) -> None:
    if not part.dry:
        os.environ.update(ONE_CARD)
    dry, most = part.dry, 2 if part.dry else 4

    def add(name: str, size: int, body: Callable[..., dict[str, Any]], *args: Any) -> None:
        part.case(f"{name}, {size} ranks", lambda: on_ranks(size, body, dry, *args), seconds=50 * timeout_scale())

    add("plain NCCL", 2, rank_bodies.plain_nccl)
    add("plain symmetric memory", 2, rank_bodies.symmetric_memory)
    draws = 8 if dry else 60
    for exchange in (
        ("auto", "point_to_point") if dry else ("auto", "peer_memory", "grouped", "staged", "point_to_point")
    ):
        add(f"pulls by {exchange}", 2, rank_bodies.pulls, exchange, draws)
    add("collectives", 2, rank_bodies.collectives)
    networks = ("ConvNeXt block", "ConvNeXt block of torchtp's layers", "ResNet")
    for name in networks:
        add(f"{name} cut on W, fp32", 2, rank_bodies.network, name, ["w"], "fp32")
    add("dense convolution, border apart", 2, rank_bodies.border, ["w"])
    if most > 2:
        add("dense convolution, border apart", most, rank_bodies.border, ["h", "w"])
        add("pulls by auto", most, rank_bodies.pulls, "auto", draws)
        add("collectives", most, rank_bodies.collectives)
        for name in networks:
            add(f"{name} cut on H and W, fp32", most, rank_bodies.network, name, ["h", "w"], "fp32")
            add(f"{name} cut on H and W, fp64", most, rank_bodies.network, name, ["h", "w"], "fp64")
    # Last what takes its deadline when it goes wrong, and the workers with it.
    for size in sorted({2, most}):
        add("graph capture", size, rank_bodies.graph)
    add("a rank that stays away", 2, rank_bodies.deadline)


if __name__ == "__main__":
    main(__doc__, run)
