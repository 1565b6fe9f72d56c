"""DTensor's own redistribution as rules do it: of a tensor of which several axes cut one dim axis by axis, of a rare dtype as bytes,
and to a cut of another dim by an alltoall.

Upstream takes the axes at once, as if their chunks were those of one group of all (see `upstream.redistributed`), so that
`full_tensor()` and `redistribute()` would give other rows where the chunks differ in length. On the CPU it gathers the whole
tensor to cut it anew, and logs that there were no alltoall (torch 2.11 to 2.15).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import _api, _dispatch, _redistribute, placement_types

from torchtp.dtensor.moving import swapped
from torchtp.dtensor.spatial import is_marked, on_first_mark
from torchtp.dtensor.upstream import DeviceMesh, DTensorSpec, nested_dims, redistributed, travels_as_bytes


def _install() -> None:
    theirs = _redistribute.redistribute_local_tensor

    @functools.wraps(theirs)
    def redistribute_local_tensor(
        local: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        nested = nested_dims(current_spec.placements) or nested_dims(target_spec.placements)
        if (nested or travels_as_bytes(local.dtype)) and is_marked(current_spec.mesh):
            return redistributed(local, current_spec, target_spec.placements)
        return theirs(local, current_spec, target_spec, *args, **kwargs)

    for module in (_redistribute, _api, _dispatch):
        module.redistribute_local_tensor = redistribute_local_tensor  # type: ignore[attr-defined]

    their_alltoall = placement_types.shard_dim_alltoall

    @functools.wraps(their_alltoall)
    def shard_dim_alltoall(
        local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
    ) -> torch.Tensor:
        if not (mesh.device_type == "cpu" and is_marked(mesh)):
            return their_alltoall(local, gather_dim, shard_dim, mesh, mesh_dim)
        # What comes here is padded to the same number of rows on all ranks.
        return swapped(local, mesh, mesh_dim, gather_dim, local.size(gather_dim) * mesh.size(mesh_dim), shard_dim)

    placement_types.shard_dim_alltoall = shard_dim_alltoall


on_first_mark(_install)
