"""How DTensors are cut: from placements to the cut lists of the spatial ops and back, remembered for each mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    DTensorSpec,
    Op,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    local_of,
    make_dtensor,
    make_spec,
    plain_shard,
    real_mesh,
    redistributed,
    spec_of,
)

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Cut:
    """The spatial dims that are cut: the three lists of a torchtp op, and the mesh axes they stand for."""

    dims: list[int]
    extents: list[int]
    groups: list[str]
    axes: list[int]

    def of(self, extents: list[int]) -> Cut:
        """The same cut of a tensor with other extents on the cut dims."""
        return Cut(self.dims, extents, self.groups, self.axes)


@dataclass
class Axes:
    """What the rules ask of a mesh again and again, asked once."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]  # none on a rank outside of the mesh
    groups: tuple[str, ...]
    spatial: set[int]  # of all meshes equal to this one
    writes_into_plain: bool = False  # whether a DTensor was ever written into a plain tensor whose gradient is recorded
    few_rows: bool = False  # whether some rank ever held less than two rows of a cut dim
    tell_order: dict[tuple[Placements, torch.Size], bool] = field(default_factory=dict)
    cuts: dict[tuple[Placements, torch.Size], Cut | None] = field(default_factory=dict)
    specs: dict[tuple[object, ...], DTensorSpec] = field(default_factory=dict)


_ATTRIBUTE = "_torchtp_axes"
_spatial: dict[int, set[int]] = {}


def axes_of(mesh: DeviceMesh) -> Axes:
    """What is known of `mesh`; kept on the mesh itself, so that it lives as long as its groups."""
    axes = mesh.__dict__.get(_ATTRIBUTE)
    if axes is None:
        if (real := real_mesh(mesh)) is not mesh:
            return axes_of(real)
        inside = range(mesh.ndim if mesh.get_coordinate() is not None else 0)  # other ranks have no groups of it
        axes = Axes(
            tuple(mesh.size(axis) for axis in range(mesh.ndim)),
            tuple(mesh.get_local_rank(axis) for axis in inside),
            tuple(mesh.get_group(axis).group_name for axis in inside),
            _spatial.setdefault(hash(mesh), set()),
        )
        setattr(mesh, _ATTRIBUTE, axes)
    return axes


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that is cut, or None."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def cut_of(mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> Cut | None:
    """The cut of dims 2 and up of a tensor [N, C, ...]; None where none is cut."""
    axes = axes_of(mesh)
    key = (placements, shape)
    try:
        return axes.cuts[key]
    except KeyError:
        pass
    chosen = [
        (placement.dim, axis)
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and placement.dim >= 2
    ]
    chosen.sort()
    if len({dim for dim, _ in chosen}) < len(chosen):
        raise NotImplementedError(f"an op on images is not made for {placements}, where several axes cut one dim")
    cut = None
    if chosen:
        cut = Cut(
            [dim for dim, _ in chosen],
            [shape[dim] for dim, _ in chosen],
            [axes.groups[axis] for _, axis in chosen],
            [axis for _, axis in chosen],
        )
    axes.cuts[key] = cut
    return cut


def is_cut(tensor: object) -> bool:
    """Whether a spatial dim of [N, C, ...] is cut. An unbatched image has one dim less: it is given a batch first."""
    return isinstance(tensor, DTensor) and cut_of(tensor.device_mesh, tensor.placements, tensor.shape) is not None


def owned(extent: int, size: int, rank: int) -> tuple[int, int]:
    """The interval [begin, end) that `rank` of `size` holds of a dim of `extent`."""
    step = -(-extent // size)
    return min(extent, rank * step), min(extent, (rank + 1) * step)


def interval(mesh: DeviceMesh, placements: Placements, dim: int, extent: int) -> tuple[int, int]:
    """The rows [begin, end) this rank holds of a dim of `extent`, which several axes may cut; of the first axes, if only theirs are given."""
    axes = axes_of(mesh)
    begin, end = 0, extent
    for axis, placement in enumerate(placements):
        if plain_shard(placement) and placement.dim == dim:
            first, last = owned(end - begin, axes.sizes[axis], axes.ranks[axis])
            begin, end = begin + first, begin + last
    return begin, end


def cut_locally(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds; no communication. Partial: the whole on rank 0 of the axis."""
    axes = axes_of(mesh)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            if placement.reduce_op != "sum":
                raise NotImplementedError(f"a replicated tensor does not become {placement}")
            if axes.ranks[axis] != 0:
                full = torch.zeros_like(full)
        elif not isinstance(placement, Replicate):
            if not plain_shard(placement):
                raise NotImplementedError(f"a replicated tensor is not cut as {placement} here")
            begin, end = owned(full.size(placement.dim), axes.sizes[axis], axes.ranks[axis])
            full = full.narrow(placement.dim, begin, end - begin)
    return full


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec = spec_of(tensor)
    return redistributed(local_of(tensor), spec, (Replicate(),) * len(spec.placements))


def on_mesh(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A gradient as a DTensor; what every rank holds where it is plain, as autograd's own zeros are.

    It makes them where a formula does not depend on an argument, and knows nothing of a DTensor but its shape.
    """
    return tensor if isinstance(tensor, DTensor) else wrap(tensor, mesh, (Replicate(),) * mesh.ndim, tensor.shape)


def wrap(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """A DTensor of global `shape`; its global stride is dense, the same on all ranks, and has the order of the local one.

    A view's is given: by it `contiguous()` and `reshape()` know that they have to copy, so that writes into the copy do not
    reach the whole.
    """
    axes = axes_of(mesh)
    if stride is None and axes.few_rows:
        local, stride = _in_one_order(axes, local, placements, shape, called.tensors())
    key = (placements, shape, local.dtype, local.stride(), stride)
    spec = axes.specs.get(key)
    if spec is None:
        if stride is None and not _tells_order(axes, placements, shape):
            return wrap(local, mesh, placements, shape)  # the first of its kind on this mesh: on all ranks
        if len(axes.specs) > 4096:
            axes.specs.clear()
        spec = make_spec(mesh, placements, shape, stride or dense_stride(shape, local.stride()), local.dtype)
        axes.specs[key] = spec
    return make_dtensor(local, spec)


class _Called(threading.local):
    """The rule or Function that runs on this thread: its op, if it is a rule, and arguments."""

    op: Op = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012

    def tensors(self) -> list[torch.Tensor]:
        """The DTensors among them, and in lists."""
        leaves = [leaf for arg in self.args for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        return [leaf for leaf in leaves if isinstance(leaf, DTensor)]

    def stride_of_one_device(self, shape: torch.Size) -> tuple[int, ...] | None:
        """Of the result of that shape, if the op can tell it without data: a convolution lies as its device's library likes."""
        if self.op is None or torch.Tag.nondeterministic_seeded in self.op.tags or "convolution" in self.op.name():
            return None
        args, kwargs = pytree.tree_map(_without_data, (self.args, self.kwargs))
        try:
            results = pytree.tree_leaves(self.op(*args, **kwargs))
        except (RuntimeError, NotImplementedError):
            return None
        strides = (leaf.stride() for leaf in results if isinstance(leaf, torch.Tensor) and leaf.shape == shape)
        return next(strides, None)


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


called = _Called()


class Function(torch.autograd.Function):
    """Of DTensors, whose arguments are `called` while it runs."""

    def __init_subclass__(cls) -> None:
        for name in ("forward", "backward"):
            setattr(cls, name, staticmethod(_as_called(getattr(cls, name))))


def _as_called(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        outer = called.op, called.args, called.kwargs
        called.op, called.args, called.kwargs = None, args, {}
        try:
            return method(ctx, *args)
        finally:
            called.op, called.args, called.kwargs = outer

    return run


def from_part(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size, made_of: torch.Tensor | None
) -> DTensor:
    """As `wrap`, for code above autograd: differentiable. `made_of` is what the part was made of, if that was the same on all ranks."""
    axes = axes_of(mesh)
    stride = None
    if not _tells_order(axes, placements, shape) or axes.few_rows:
        local, stride = _in_one_order(axes, local, placements, shape, [] if made_of is None else [made_of])
    stride = stride or dense_stride(shape, local.stride())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _in_one_order(
    axes: Axes, local: torch.Tensor, placements: Placements, shape: torch.Size, made_of: list[torch.Tensor]
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The part, and strides of the whole that are the same on all ranks; None where each tells them by its own.

    Where some have too few rows for that they are in the order that one device would give them, or of the first tensor
    that it was made of. What was made of such tensors may lie in another order on each rank: it is brought to this one.
    """
    tells = _tells_order(axes, placements, shape)
    specs = [spec_of(tensor) for tensor in made_of if isinstance(tensor, DTensor)]
    if tells and all(_tells_order(axes_of(spec.mesh), spec.placements, spec.shape) for spec in specs):
        return local, None
    like = called.stride_of_one_device(shape)
    if like is None and made_of and made_of[0].dim() == len(shape):
        like = made_of[0].stride()
    stride = dense_stride(shape, like)
    return in_order(local, stride) if tells else local, stride


def in_order(local: torch.Tensor, whole: tuple[int, ...]) -> torch.Tensor:
    """The part dense and in the order of the strides of the whole; itself if it is."""
    stride = dense_stride(local.shape, whole)
    if same_order(local.shape, local.stride(), stride):
        return local
    return torch.empty_strided(local.shape, stride, dtype=local.dtype, device=local.device).copy_(local)


def _tells_order(axes: Axes, placements: Placements, shape: torch.Size) -> bool:
    """Whether each rank holds at least two rows of every cut dim: the strides of fewer say nothing of the order in memory.

    Derivatives go by strides (of a product: which factor is transposed), and have to take the same way on all ranks.
    """
    key = placements, shape
    tells = axes.tell_order.get(key)
    if tells is None:
        extents: dict[int, set[int]] = {}
        for size, placement in zip(axes.sizes, placements, strict=True):
            if plain_shard(placement):
                whole = extents.get(placement.dim, {shape[placement.dim]})
                bounds = [owned(extent, size, rank) for extent in whole for rank in range(size)]
                extents[placement.dim] = {end - begin for begin, end in bounds}
        tells = axes.tell_order[key] = all(min(parts) > 1 for parts in extents.values())
        axes.few_rows = axes.few_rows or not tells
    return tells


def dense_stride(shape: torch.Size, like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in memory in the order of strides `like`, by default in theirs.

    Those of dims of one row, which say nothing and differ from rank to rank in `like`, are what a contiguous tensor has.
    """
    stride = [1] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim] if like else 0, -dim)):
        if shape[dim] != 1:
            stride[dim] = step
            step *= max(1, shape[dim])
    for dim in range(len(shape) - 2, -1, -1):
        if shape[dim] == 1:
            outermost = all(size == 1 for size in shape[:dim])
            stride[dim] = step if outermost else stride[dim + 1] * max(1, shape[dim + 1])
    return tuple(stride)


def same_order(shape: torch.Size, stride: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether strides of a tensor differ at most where it has one row."""
    return all(a == b or size == 1 for size, a, b in zip(shape, stride, other, strict=True))


def sums_done(placements: Placements) -> Placements:
    """The placements with what is still to be summed whole."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def num_shards(mesh: DeviceMesh, placements: Placements) -> int:
    """How many pieces the tensor is cut into: over how many ranks a sum over its elements is partial."""
    number = 1
    for size, placement in zip(axes_of(mesh).sizes, placements, strict=True):
        if not isinstance(placement, Replicate):
            number *= size
    return number


def partial_over_shards(placements: Placements) -> Placements:
    """The placements of a sum over a tensor's cut dims: Partial where it is cut."""
    return tuple(placement if isinstance(placement, Replicate) else Partial() for placement in placements)


def parameter_gradient(
    share: torch.Tensor, parameter: torch.Tensor, mesh: DeviceMesh, placements: Placements
) -> torch.Tensor:
    """What is handed out as the gradient of a parameter of an op on an activation with `placements`.

    For a plain parameter the mean rule: the share multiplied by the number of shards, so that the gradient is the mean
    over all ranks. For a DTensor parameter a DTensor that is Partial where the activation is cut.
    """
    if isinstance(parameter, DTensor):
        return wrap(share, mesh, partial_over_shards(placements), share.shape)
    shards = num_shards(mesh, placements)
    return share.mul_(shards) if shards > 1 else share
