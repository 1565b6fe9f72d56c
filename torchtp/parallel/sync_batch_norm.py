"""torch.nn.SyncBatchNorm of cut images: the statistics of all parts of the images of all data ranks, on CPUs too."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from torchtp.dtensor.cut import axes_of, num_shards
from torchtp.dtensor.spatial import is_marked, local_part
from torchtp.dtensor.upstream import plain_shard
from torchtp.dtensor.wrapping import from_part
from torchtp.layout import Layout
from torchtp.parallel import classes, lazy
from torchtp.parallel.remembered import remembered

_GROUP = "_torchtp_data_group"


def prepare(root: nn.Module, layout: Layout) -> None:
    """Have every SyncBatchNorm under `root` take cut activations.

    Raises ValueError for a process group that is neither all ranks of `layout.group`, nor this rank's along the data axis,
    nor within one image.
    """
    for name, module in root.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            object.__setattr__(module, _GROUP, _data_group(name, module, layout))
            if not isinstance(module, _Synchronized):
                classes.become(module, _synchronized(cast(Any, type(module))))


def _data_group(name: str, module: nn.SyncBatchNorm, layout: Layout) -> str | None:
    """The group over whose ranks the images' statistics are merged, or None where an image has its own."""
    if layout.data is None:
        return None
    group = layout.mesh[layout.data].get_group()
    if module.process_group is None:
        return group.group_name if layout.num_data > 1 else None
    ranks = set(dist.get_process_group_ranks(module.process_group))
    if ranks <= set(dist.get_process_group_ranks(layout.spatial_group)):
        return None
    if ranks >= set(dist.get_process_group_ranks(layout.group)) or ranks == set(dist.get_process_group_ranks(group)):
        return group.group_name
    raise ValueError(
        f"{name}, a SyncBatchNorm, has a process group of the ranks {sorted(ranks)}, which is neither all of the layout's nor "
        "those along its data axis: leave process_group out"
    )


class _Synchronized(nn.SyncBatchNorm, classes.Remade):
    """Stands between SyncBatchNorm and what people derive from it, whose forward may do more (timm's has an activation)."""

    __slots__ = ()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and isinstance(input, DTensor) and is_marked(input.device_mesh):
            return _normed(self, input)
        return super().forward(input)


@remembered
def _synchronized(base: type[nn.SyncBatchNorm]) -> type:
    return classes.remade(base, (_Synchronized,), {}, _synchronized)


def _normed(module: nn.SyncBatchNorm, input: DTensor) -> DTensor:
    mesh = input.device_mesh
    local, kept = local_part(torch.ops.aten.native_batch_norm.default, input, lambda dim: dim != 1, nested=True)
    weight, bias = (
        parameter if parameter is None else lazy.Scaled.apply(lazy.unwrap(parameter), num_shards(mesh, kept))
        for parameter in (module.weight, module.bias)
    )
    groups = [name for name, place in zip(axes_of(mesh).groups, kept, strict=True) if plain_shard(place)]
    over_data: str | None = getattr(module, _GROUP)
    if over_data is None:  # else other ranks have images too
        F._verify_batch_size(list(input.shape))  # type: ignore[attr-defined]
    tracked = (module.running_mean, module.running_var) if module.track_running_stats else (None, None)
    output = torch.ops.torchtp.batch_norm(
        local, weight, bias, *map(lazy.unwrap, tracked), True, _share(module), module.eps,
        groups if over_data is None else [*groups, over_data],
    )[0]  # fmt: skip
    return from_part(output, mesh, kept, input.shape, input)


def _share(module: Any) -> float:
    """The share that this batch has in the running statistics; counts the batch."""
    if module.track_running_stats and module.num_batches_tracked is not None:
        counter = lazy.unwrap(module.num_batches_tracked)
        counter.add_(1)
        if module.momentum is None:
            return 1.0 / float(counter)
    return 0.0 if module.momentum is None else float(module.momentum)
