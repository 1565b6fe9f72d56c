"""From a rank's part to a DTensor, whose strides are those of the whole: the same on all ranks (docs/design.md, Strides)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor.cut import MOST_SHAPES, Axes, Placements, axes_of, num_shards, owned, partial_over_shards
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Replicate,
    forget_shapes,
    hold,
    local_of,
    make_dtensor,
    make_spec,
    plain_shard,
    spec_of,
    suggest_memory_format,
)


def wrap(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
    stride: tuple[int, ...] | None = None,
    made_of: Sequence[torch.Tensor] = (),
) -> DTensor:
    """A DTensor of global `shape`; its global stride is dense, the same on all ranks, and has the order of the local one.

    A view's is given: by it `contiguous()` and `reshape()` know that they have to copy, so that writes into the copy do not
    reach the whole. `made_of` is what a Function has kept and made it of, beside what it is called with.
    """
    axes = axes_of(mesh)
    if stride is None and axes.few_rows:
        local, stride = _in_one_order(axes, local, placements, shape, [*made_of, *called.tensors()])
    key = (placements, shape, local.dtype, local.stride(), stride)
    spec = axes.specs.get(key)
    if spec is None:
        if _first_few_rows(axes, placements, shape) and stride is None:
            # The first of its kind on this mesh: on all ranks.
            return wrap(local, mesh, placements, shape, made_of=made_of)
        if len(axes.specs) > MOST_SHAPES:
            axes.specs.clear()
            axes.outgrown = True
        spec = make_spec(mesh, placements, shape, stride or dense_stride(shape, local.stride()), local.dtype)
        axes.specs[key] = spec
    return make_dtensor(local, spec)


def forget_outgrown(mesh: DeviceMesh) -> None:
    """Drop what PyTorch remembers of shapes, if there were many on `mesh`; between two ops, not inside one that may be asking."""
    axes = axes_of(mesh)
    if axes.outgrown:
        axes.outgrown = False
        forget_shapes()


class _Called(threading.local):
    """The rule or Function that runs on this thread: its op, None of a Function, and arguments."""

    now: tuple[Op, tuple[Any, ...], dict[str, Any]] = (None, (), {})

    def tensors(self) -> list[DTensor]:
        """The DTensors among them, and in lists."""
        leaves = [leaf for arg in self.now[1] for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        return [leaf for leaf in leaves if isinstance(leaf, DTensor)]

    def stride_of_one_device(self, shape: torch.Size) -> tuple[int, ...] | None:
        """Of the result of that shape, if the op can tell it without data: a convolution lies as its device's library likes."""
        op, *given = self.now
        if op is None or torch.Tag.nondeterministic_seeded in op.tags or "convolution" in op.name():
            return None
        args, kwargs = pytree.tree_map(_without_data, given)
        try:
            results = pytree.tree_leaves(op(*args, **kwargs))
        except (RuntimeError, NotImplementedError, TypeError):  # the last by upsampling of no images
            return None
        strides = (leaf.stride() for leaf in results if isinstance(leaf, torch.Tensor) and leaf.shape == shape)
        return next(strides, None)


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


called = _Called()


class Function(torch.autograd.Function):
    """Of DTensors; while it runs, its arguments are known as `called`."""

    def __init_subclass__(cls) -> None:
        for name in ("forward", "backward"):
            setattr(cls, name, staticmethod(_as_called(getattr(cls, name))))


def _as_called(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        outer, called.now = called.now, (None, args, {})
        try:
            return method(ctx, *args)
        finally:
            called.now = outer

    return run


def from_part(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size, made_of: torch.Tensor | None
) -> DTensor:
    """As `wrap`, for code above autograd: differentiable. `made_of` is what the part was made of, if that was the same on all ranks."""
    local = local.resolve_conj().resolve_neg()  # which no op on a DTensor would do any more
    local, stride = _in_one_order(axes_of(mesh), local, placements, shape, [] if made_of is None else [made_of])
    stride = stride or dense_stride(shape, local.stride())
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if not torch.compiler.is_compiling() and local_of(whole).stride() != local.stride():
        # It holds a `view_as`, which has another stride for a single image: kernels would not see any more that it is channels last.
        hold(whole, local.detach())
    return whole


def wrap_as_one_device(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    """As `wrap`, of a part that lies as it happens to be made of pieces on its rank: brought to the order of one device."""
    stride = dense_stride(shape, called.stride_of_one_device(shape))
    local = in_order(local, stride)
    return wrap(_with_strides(local, dense_stride(local.shape, stride)), mesh, placements, shape, stride)


def wrap_in_format(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size, like: torch.Tensor | None = None
) -> DTensor:
    """As `wrap`, of a result that one device's kernels write contiguous, or channels last if `like` lies so."""
    order = torch.contiguous_format if like is None else suggest_memory_format(_without_data(like))
    stride = _stride_in(order, shape)
    local = in_order(local, stride)
    return wrap(_with_strides(local, _stride_in(order, local.shape)), mesh, placements, shape, stride)


@lru_cache(4096)
def _stride_in(order: torch.memory_format, shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=order).stride()


def _with_strides(local: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The part with these strides, which differ from its own at most where it has one row: by those, too, ops choose how their result lies."""
    return local if local.stride() == stride else local.as_strided(local.shape, stride)


def _in_one_order(
    axes: Axes, local: torch.Tensor, placements: Placements, shape: torch.Size, made_of: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The part, and strides of the whole that are the same on all ranks; None where each tells them by its own.

    Where some have too few rows for that they are in the order that one device would give them, or of the first tensor
    that it was made of. Such parts, and what is made of them, may lie in another order on each rank: they are brought to this one.
    """
    tells = tells_order(axes, placements, shape)
    if tells and all(_tells_order_of(tensor) for tensor in made_of if isinstance(tensor, DTensor)):
        return local, None
    like = called.stride_of_one_device(shape)
    if like is None and made_of and made_of[0].dim() == len(shape):
        like = made_of[0].stride()
    stride = dense_stride(shape, like)
    local = in_order(local, stride)
    return _with_strides(local, dense_stride(local.shape, stride)), stride


def in_order(local: torch.Tensor, whole: tuple[int, ...]) -> torch.Tensor:
    """The part dense and in the order of the strides of the whole; itself if it is."""
    stride = dense_stride(local.shape, whole)
    if same_order(local.shape, local.stride(), stride):
        return local
    return torch.empty_strided(local.shape, stride, dtype=local.dtype, device=local.device).copy_(local)


def tells_order(axes: Axes, placements: Placements, shape: torch.Size) -> bool:
    """Whether each rank holds at least two rows of every cut dim: the strides of fewer say nothing of the order in memory.

    Derivatives go by strides (of a product: which factor is transposed), and have to take the same way on all ranks.
    """
    key = placements, shape
    tells = axes.tell_order.get(key)
    if tells is None:
        if len(axes.tell_order) > MOST_SHAPES:
            axes.tell_order.clear()
        extents: dict[int, set[int]] = {}
        for size, placement in zip(axes.sizes, placements, strict=True):
            if plain_shard(placement):
                whole = extents.get(placement.dim, {shape[placement.dim]})
                bounds = [owned(extent, size, rank) for extent in whole for rank in range(size)]
                extents[placement.dim] = {end - begin for begin, end in bounds}
        tells = axes.tell_order[key] = all(min(parts) > 1 for parts in extents.values())
        axes.few_rows = axes.few_rows or not tells
    return tells


def _tells_order_of(tensor: DTensor) -> bool:
    spec = spec_of(tensor)
    return tells_order(axes_of(spec.mesh), spec.placements, spec.shape)


def dense_stride(shape: torch.Size, like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in memory in the order of strides `like`, by default in theirs.

    Those of dims of one row, which say nothing and differ from rank to rank in `like`, step over all that the dims behind it
    hold, as in a contiguous tensor: kernels for matrices go from one to the next by the stride in front of them.
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
            behind = (stride[inner] * max(1, shape[inner]) for inner in range(dim + 1, len(shape)))
            stride[dim] = step if outermost else max(behind)
    return tuple(stride)


def _first_few_rows(axes: Axes, placements: Placements, shape: torch.Size) -> bool:
    """Whether this tensor, or one that it is made of, is the first on its mesh that some rank has too few rows of.

    What it is made of may have come with strides from elsewhere: an image that takes a gradient, a DTensor that the program made.
    """
    known = axes.few_rows
    tells_order(axes, placements, shape)
    for tensor in called.tensors():
        _tells_order_of(tensor)
    return axes.few_rows and not known


def same_order(shape: torch.Size, stride: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether strides of a tensor differ at most where it has one row."""
    return all(a == b or size == 1 for size, a, b in zip(shape, stride, other, strict=True))


def on_mesh(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A gradient as a DTensor; what every rank holds where it is plain, as autograd's own zeros are.

    It makes them where a formula does not depend on an argument, and knows nothing of a DTensor but its shape.
    """
    return tensor if isinstance(tensor, DTensor) else wrap(tensor, mesh, (Replicate(),) * mesh.ndim, tensor.shape)


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
