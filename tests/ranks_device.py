"""Where ranks of the tests of rules have their tensors: the CPU, or with TORCHTP_TEST_CARD=1 one card that all share."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchtp.testing

ON_CARD = bool(os.environ.get("TORCHTP_TEST_CARD"))
DEVICE = torch.device("cuda", 0) if ON_CARD else torch.device("cpu")


def moved(what: Any) -> Any:
    """A tensor or a module."""
    return what.to(DEVICE) if ON_CARD else what


def make_mesh(shape: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
    if ON_CARD:
        os.environ["NCCL_HOSTID"] = f"rank-{dist.get_rank()}"  # NCCL takes ranks of one host to have a card each
        torch.cuda.set_device(DEVICE)
    return init_device_mesh(DEVICE.type, tuple(shape), mesh_dim_names=None if names is None else tuple(names))


def use_the_card() -> None:
    """Tests that name no backend get one that moves tensors of the card."""
    torchtp.testing.run_ranks = functools.partial(torchtp.testing.run_ranks, backend="torchtp")
