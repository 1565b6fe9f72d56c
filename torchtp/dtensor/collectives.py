"""torch.distributed's own collectives on DTensors: they take what every rank holds whole, a loss to be logged say."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor.registry import install
from torchtp.dtensor.spatial import is_marked, on_first_mark
from torchtp.dtensor.upstream import DTensor, Op, Replicate, local_of, passthrough, spec_of


def _collective(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not all(is_marked(leaf.device_mesh) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)):
        return passthrough(op, args, kwargs)
    name = op.name().removeprefix("c10d::")

    def held(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        placements = spec_of(leaf).placements
        if not all(isinstance(placement, Replicate) for placement in placements):
            raise TypeError(
                f"{name} of torch.distributed takes plain tensors, but this one of shape {tuple(leaf.shape)} is placed "
                f"{placements}: call full_tensor() first, on every rank of its mesh"
            )
        return local_of(leaf)

    return op(*pytree.tree_map(held, args), **pytree.tree_map(held, kwargs))


def _install() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            install(name, _collective)


on_first_mark(_install)
