"""Tensors that a forward makes and then fills with cut values: `o = torch.zeros(...)`, `o[:, :, 1:] = y[:, :, 1:]`.

A cost volume, the inverse of a wavelet transform, modes of a spectrum. Made before anything cut, each is whole on every
rank; by the first cut values that are written into a slice of it, it becomes a DTensor that is cut as they are.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils import _device
from torch.utils import _pytree as pytree

from torchtp.dtensor.agreed import true_on_all
from torchtp.dtensor.cut import Placements, cut_locally
from torchtp.dtensor.registry import words
from torchtp.dtensor.spatial import is_spatial, on_first_mark
from torchtp.dtensor.upstream import Partial, Placement, Replicate, Shard, local_of, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap
from torchtp.parallel.running import is_running, writes, written_now

_FACTORIES = ("zeros", "ones", "empty", "full")
# What makes one like it, on a device or of a dtype.
_ALIKE = {
    *(getattr(torch, f"{name}_like") for name in _FACTORIES),
    *(getattr(torch.Tensor, name) for name in words("to type type_as float double half bfloat16 cpu cuda clone")),
}
_OFFLOADS = torch.autograd.graph.__name__  # save_on_cpu into pinned memory: what forward saves is to stay cut
_LEAST_DIMS = 3  # [C, H, W]; masks and tables have fewer, and are wanted whole
_ALONE = 2  # references to its storage: its own, and that of the object that is asked
_SET_ITEM = torch.Tensor.__setitem__


class Canvas(torch.Tensor):
    """A plain tensor in all but this: cut values that are written into a slice of it make it a DTensor, in its place."""

    __slots__ = DTensor.__slots__  # without them no object could become one

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(plainly(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plainly(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:  # its inputs are what the graph was made of
            if any(kind not in (Canvas, DTensor, torch.Tensor) for kind in types):
                return NotImplemented
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(kind not in (Canvas, torch.Tensor) for kind in types):  # theirs to decide: to them it is a plain tensor
            return _on_plain(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func == _SET_ITEM:
                _cut_by(*args)
            elif len(args) > 1 and writes(func):
                _cut_by(args[0], ..., args[1])
            if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
                result = _on_plain(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            return _canvas(result) if func in _ALIKE and is_running() else result


def _on_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain, others = pytree.tree_map(plainly, (args, kwargs))
    result = func(*plain, **others)
    return args[0] if plain and result is plain[0] else result


def plainly(value: Any) -> Any:
    """A canvas as the plain tensor that it is; anything else as it is."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Canvas) else value


def _cut_by(target: Any, index: Any, value: Any) -> None:
    """Makes the target a DTensor if it is a canvas of this forward, nothing else refers to it, and the value tells how."""
    if not (isinstance(target, Canvas) and is_spatial(value)) or target.requires_grad:
        return
    if target._born is not written_now() or not is_running():  # type: ignore[attr-defined]
        return
    placements = _placements(target, index, value)
    if placements is None or not _is_alone_everywhere(target, value):
        return
    with torch.no_grad():
        mesh = value.device_mesh
        part = cut_locally(plainly(target), mesh, placements).clone(memory_format=torch.contiguous_format)
        cut = wrap(part, mesh, placements, target.shape)
    del target._born  # type: ignore[attr-defined]
    torch.utils.swap_tensors(target, cut)


def _is_alone_everywhere(target: Canvas, value: DTensor) -> bool:
    """Whether it is so on all ranks, which go the same way: one alone may have kept a view, to plot it."""
    return true_on_all([_is_alone(target)], value.device_mesh, local_of(value).device)[0]


def _is_alone(target: Canvas) -> bool:
    """Whether no view shares the memory, which would not see what is written from now on."""
    if target._use_count() > 1:  # type: ignore[attr-defined]
        return False
    references: int = torch._C._storage_Use_Count(target.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return references <= _ALONE


def _placements(target: Canvas, index: Any, value: DTensor) -> Placements | None:
    """Of a target that is cut where the value is, if the index is of slices and numbers and the value fills its cut dims."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(type(item) not in (slice, int, type(...)) for item in items):
        return None
    if ... not in items:
        items.append(...)
    at = items.index(...)
    items[at : at + 1] = [slice(None)] * (target.dim() - len(items) + 1)
    if len(items) != target.dim() or ... in items:
        return None
    slices = [
        (dim, len(range(*item.indices(target.size(dim))))) for dim, item in enumerate(items) if isinstance(item, slice)
    ]
    placements: list[Placement] = []
    for placement in spec_of(value).placements:
        if isinstance(placement, (Replicate, Partial)):
            placements.append(Replicate())
            continue
        beside = len(slices) - value.dim()
        if not plain_shard(placement) or beside + placement.dim < 0:
            return None
        dim, extent = slices[beside + placement.dim]
        if extent != value.size(placement.dim):
            return None
        placements.append(Shard(dim))
    return tuple(placements)


def _canvas(made: torch.Tensor) -> torch.Tensor:
    """What has just been made, as a canvas of this forward if it may be one."""
    if type(made) is not torch.Tensor or made.layout != torch.strided:
        return made
    if made.requires_grad or made.dim() < _LEAST_DIMS or made._is_view():  # type: ignore[no-untyped-call]
        return made
    if not made.untyped_storage().resizable():  # memory of others: of numpy
        return made
    canvas = torch.Tensor._make_subclass(Canvas, made)
    canvas._born = written_now()  # type: ignore[attr-defined]
    return canvas


def _watched(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if torch.compiler.is_compiling() or not is_running() or "out" in kwargs:
            return made
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(("torch.", "torchtp.")) and caller != _OFFLOADS:
            return made
        return _canvas(made)

    watched.__module__, watched.__qualname__ = "torch", make.__name__
    return watched


def _install() -> None:
    _device._device_constructors()  # notes down the functions as they are, for the default device
    for name in _FACTORIES:
        watched = _watched(getattr(torch, name))
        torch.jit._builtins._register_builtin(watched, f"aten::{name}")
        setattr(torch, name, watched)
    # Older programs: Variable(torch.FloatTensor(n, c, d, h, w).zero_()).
    Variable.__new__ = staticmethod(_watched(Variable.__new__))  # type: ignore[assignment]


on_first_mark(_install)
