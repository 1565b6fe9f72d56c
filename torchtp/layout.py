"""What is cut where: the one object that ties the axes of a device mesh to the dims of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtp._compile import eagerly
from torchtp.dtensor import mark
from torchtp.dtensor.cut import axes_of
from torchtp.dtensor.whole import Cut, dense_format, told_format
from torchtp.dtensor.wrapping import from_part, tells_order
from torchtp.parallel.agreement import Agreement, Call


class Layout:
    """Which mesh axis cuts which dim of an image, and which one counts the images.

    `spatial` maps mesh axes to the dims they cut: negative dims count from the end ({"h": -2, "w": -1} for
    [N, C, H, W] as well as for targets [N, H, W]), positive ones from the front. `data` is the axis over which ranks
    have different images. Every axis of the mesh is one or the other. Collective over the mesh. One layout serves
    any number of models; every other one keeps a process group of its own until the job's groups are destroyed.

    Raises ValueError for an axis the mesh has not, one that is neither spatial nor data or both, a dim that is the
    batch's or the channels', and two axes on one dim; TypeError for what is no mesh, or maps no axes to dims.
    """

    def __init__(self, mesh: DeviceMesh, spatial: Mapping[str, int], data: str | None = None):
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"a Layout takes a DeviceMesh (torch.distributed.device_mesh), but it is a {type(mesh).__name__}"
            )
        if not isinstance(spatial, Mapping) or not all(isinstance(dim, int) for dim in spatial.values()):
            raise TypeError(
                f'spatial maps axes to the dims they cut, as in {{"h": -2, "w": -1}}, but it is {spatial!r}'
            )
        names = mesh.mesh_dim_names
        _check_axes(names, spatial, data)
        assert names is not None
        self.mesh = mesh
        self.data = data
        self.spatial = {name: int(spatial[name]) for name in names if name in spatial}
        self.spatial_mesh = mesh if len(self.spatial) == len(names) else mesh[tuple(self.spatial)]
        self.group: dist.ProcessGroup = _flat_group(mesh)
        self.spatial_group: dist.ProcessGroup = _flat_group(self.spatial_mesh)
        self.num_data: int = mesh[data].size() if data else 1
        self.data_rank: int = mesh.get_local_rank(data) if data else 0
        self.agreement = Agreement(self.spatial_group, self.group, mesh.device_type)
        mark(self.spatial_mesh, range(len(self.spatial)))

    def __repr__(self) -> str:
        sizes = {name: self.mesh[name].size() for name in self.mesh.mesh_dim_names or ()}
        cuts = ", ".join(f"{name} ({sizes[name]}) cuts dim {dim}" for name, dim in self.spatial.items())
        return f"Layout({cuts}" + (f"; {self.num_data} x data over {self.data})" if self.data else ")")

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self  # process groups are not copied: a copied model lives on the same mesh

    @cached_property
    def gradient_group(self) -> dist.ProcessGroup:
        """The ranks of `group`, for gradients: their buckets must not delay what norms add up while backward runs.

        Collective when first asked for. It is `group` itself where that is not the whole world, which would have to
        take part.
        """
        whole = self.group.size() == dist.get_world_size() and dist.get_backend(self.group) == dist.get_backend()
        return dist.new_group(dist.get_process_group_ranks(self.group)) if whole else self.group

    @property
    def num_shards(self) -> int:
        """Into how many pieces an image is cut."""
        return self.spatial_group.size()

    @property
    def spatial_rank(self) -> int:
        """This rank among those that hold pieces of the same image."""
        return self.spatial_group.rank()

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        if self.mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.mesh.device_type)

    def placements(self, num_dims: int) -> tuple[Placement, ...]:
        """How a tensor of that many dims is placed on `spatial_mesh`. ValueError if it has too few."""
        dims = [self._dim(name, num_dims) for name in self.spatial]
        if len(set(dims)) < len(dims):
            raise ValueError(
                f"two axes cut one dim of a tensor of {num_dims} dims: {self.spatial}; count all dims from the front or all "
                "from the back"
            )
        return tuple(Shard(dim) for dim in dims)

    def reaches(self, num_dims: int) -> bool:
        """Whether a tensor of that many dims has the dims that are cut behind its first one."""
        return all(0 < (dim if dim >= 0 else dim + num_dims) < num_dims for dim in self.spatial.values())

    def tile(self, global_shape: Sequence[int]) -> tuple[slice, ...]:
        """The slices of this rank's part of a tensor of `global_shape`: `full[layout.tile(full.shape)]`.

        ValueError if it lacks a dim that is cut, or an extent is negative.
        """
        if any(isinstance(extent, float) or (isinstance(extent, int) and extent < 0) for extent in global_shape):
            raise ValueError(f"the extents of a shape are whole numbers from 0 on, but it is {tuple(global_shape)}")
        global_shape = _size(global_shape)
        self.placements(len(global_shape))
        slices = [slice(0, extent) for extent in global_shape]
        for name in self.spatial:
            dim = self._dim(name, len(slices))
            step = -(-global_shape[dim] // self.mesh[name].size())
            rank = self.mesh.get_local_rank(name)
            slices[dim] = slice(min(global_shape[dim], rank * step), min(global_shape[dim], (rank + 1) * step))
        return tuple(slices)

    def tile_shape(self, global_shape: Sequence[int]) -> torch.Size:
        """The shape of this rank's part of a tensor of `global_shape`."""
        return torch.Size(part.stop - part.start for part in self.tile(global_shape))

    @eagerly
    def shard(self, full: torch.Tensor) -> DTensor:
        """Cut a tensor that every rank of the spatial group holds; no communication (its gradient is gathered).

        So nobody compares their values, as `torchtp.parallelize` does; other extents are an error where rows are exchanged.
        A DTensor on the spatial mesh is returned as it is. Raises ValueError if it lacks a dim that is cut, or lives
        on another device.
        """
        self.check(full)
        if isinstance(full, DTensor):
            return full
        placements = self.placements(full.dim())
        if full.requires_grad and torch.is_grad_enabled():
            return Cut.apply(full, self.spatial_mesh, placements)
        local = full.detach()[self.tile(full.shape)]
        if self.num_shards > 1:
            # Memory of its own, also on a rank that holds all of it: a view would keep the whole image alive, every pull
            # would make it dense anew, and what is written into it would reach the image on one rank and not on the others.
            local = local.clone(memory_format=dense_format(full))
        return from_part(local, self.spatial_mesh, placements, full.shape, full)

    @eagerly
    def from_tile(self, tile: torch.Tensor, global_shape: Sequence[int]) -> DTensor:
        """This rank's part (see `tile`) as one tensor of `global_shape`; differentiable.

        Collective over the spatial group: a part that was cut for another shape is a ValueError on all its ranks.
        """
        shape = torch.Size(())
        complaint = what = ""
        try:
            shape = _size(global_shape)
            self.check(tile)
            what = "an image" + self._told_format(tile, shape)
            expected = self.tile_shape(shape)
            if tile.shape != expected:
                complaint = (
                    f"a tile of shape {tuple(tile.shape)} is not this rank's part of an image of shape {tuple(shape)}: "
                    f"that is {tuple(expected)} ({self}); cut it with layout.tile(global_shape)"
                )
        except (ValueError, TypeError) as error:
            complaint = str(error)
        self.agreement.check(Call([(what, shape, getattr(tile, "dtype", torch.float32))], complaint))
        return from_part(tile, self.spatial_mesh, self.placements(len(shape)), shape, None)

    def _told_format(self, tile: torch.Tensor, shape: torch.Size) -> str:
        """Nothing where tiles of few rows are in any format."""
        tells = tells_order(axes_of(self.spatial_mesh), self.placements(len(shape)), shape)
        return told_format(tile) if tells else ""

    @eagerly
    def replicate(self, tensor: torch.Tensor) -> DTensor:
        """A tensor that every rank of the spatial group holds and shall keep whole."""
        self.check(tensor)
        return DTensor.from_local(tensor.resolve_conj().resolve_neg(), self.spatial_mesh, self._whole, run_check=False)

    @eagerly
    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor on every rank of the spatial group; differentiable, collective. Plain tensors stay."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @property
    def _whole(self) -> tuple[Placement, ...]:
        return (Replicate(),) * len(self.spatial)

    def _dim(self, name: str, num_dims: int) -> int:
        dim = self.spatial[name]
        normal = dim if dim >= 0 else dim + num_dims
        if not 0 <= normal < num_dims:
            raise ValueError(
                f"axis {name!r} cuts dim {dim}, which a tensor of {num_dims} dims does not have: "
                "give it the dims of an image, or leave it uncut with layout.replicate()"
            )
        return normal

    def check(self, tensor: torch.Tensor) -> None:
        """ValueError if the tensor is not dense, on another kind of device, or a DTensor on another mesh; TypeError of anything else."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a Layout cuts tensors, not a {type(tensor).__name__}")
        if tensor.device.type != self.mesh.device_type:
            raise ValueError(
                f"a tensor on {tensor.device} can't be cut over a mesh of {self.mesh.device_type} devices: "
                f"move it with .to({str(self.device)!r})"
            )
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind, remedy = ("nested", "to_padded_tensor") if tensor.is_nested else (str(tensor.layout), "to_dense")
            raise ValueError(f"a {kind.removeprefix('torch.')} tensor can't be cut: pass a dense one ({remedy}())")
        if isinstance(tensor, DTensor) and tensor.device_mesh != self.spatial_mesh:
            raise ValueError(
                f"a DTensor on {tensor.device_mesh} is not on the spatial mesh of this layout, {self.spatial_mesh}: "
                "make it with layout.shard() or layout.from_tile()"
            )


def _size(shape: Any) -> torch.Size:
    try:
        return torch.Size(shape)
    except TypeError as error:
        given = "a tensor: pass its shape" if isinstance(shape, torch.Tensor) else repr(shape)
        raise TypeError(f"global_shape is the whole numbers of the shape of an image, but it is {given}") from error


def check_types(caller: str, module: object, layout: object) -> None:
    """TypeError for what is no module or no Layout."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{caller} takes a torch.nn.Module and a torchtp.Layout, but the first is a {type(module).__name__}"
        )
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{caller} takes a torchtp.Layout, but it is a {type(layout).__name__}: "
            'torchtp.Layout(mesh, {"w": -1}) says which axis of a mesh cuts which dim'
        )


def _check_axes(names: tuple[str, ...] | None, spatial: Mapping[str, int], data: str | None) -> None:
    if not names:
        raise ValueError('the mesh has no names for its axes: init_device_mesh(..., mesh_dim_names=("dp", "h", "w"))')
    if not spatial:
        raise ValueError(f'no axis cuts anything: give spatial={{axis: dim}}, as in {{"w": -1}}, of the axes {names}')
    for name in [*spatial, *([] if data is None else [data])]:
        if name not in names:
            raise ValueError(f"the mesh has no axis {name!r}, its axes are {names}")
    if data in spatial:
        raise ValueError(f"axis {data!r} is given as spatial and as data: it is one or the other")
    for name in names:
        if name not in spatial and name != data:
            raise ValueError(
                f"axis {name!r} of the mesh is neither spatial nor data: say which, or pass the mesh without it"
            )
    for name, dim in spatial.items():
        if dim in (0, 1):
            what = "batch" if dim == 0 else "channel"
            raise ValueError(
                f"axis {name!r} cuts dim {dim}, the {what} dim of an image [N, C, ...]: cut a spatial dim (2 and up, or "
                "-1, -2, -3), and use data= for the batch"
            )
        if dim < -3:
            raise ValueError(
                f"axis {name!r} cuts dim {dim}, the channel or batch dim of any image: cut one of -1, -2, -3"
            )
    if len(set(spatial.values())) < len(spatial):
        raise ValueError(f"two axes cut one dim: {dict(spatial)}; flatten them into one axis, or cut two dims")


def _flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
