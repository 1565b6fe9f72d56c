"""Several mesh axes that cut one dim, one inside the other, as a sequence of pixels is cut whose image was along H and W.

Rules know of one axis for a dim. Those that may be given more say so; to others each such tensor comes with another dim cut
instead, or whole over the inner axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree as pytree

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, axes_of
from torchtp.dtensor.moving import Recut, gathers, put_into, recut_tensor
from torchtp.dtensor.parts import linked_by_way
from torchtp.dtensor.upstream import (
    DTensor,
    Op,
    Placement,
    Replicate,
    Shard,
    nested_dims,
    plain_shard,
    spec_of,
)

Handler = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]
Untouched = Callable[[Op, tuple[Any, ...], dict[str, Any], set[int]], bool]  # whether a call leaves these dims alone

_takers: dict[Handler, Untouched | None] = {}


def takes_nested(handler: Handler) -> Handler:
    """Mark a rule that takes tensors of which several axes cut one dim."""
    _takers[handler] = None
    return handler


def takes_nested_if(untouched: Untouched) -> Callable[[Handler], Handler]:
    """The same where the call leaves the dims alone that several axes cut."""

    def mark(handler: Handler) -> Handler:
        _takers[handler] = untouched
        return handler

    return mark


def is_nested(tensor: Any) -> bool:
    """Whether several axes cut one dim of an activation. Parameters of other parallelisms are upstream's."""
    if not isinstance(tensor, DTensor):
        return False
    spec = spec_of(tensor)
    dims = nested_dims(spec.placements) if len(spec.placements) > 1 else ()
    return bool(dims) and (max(dims) >= 2 or bool(axes_of(spec.mesh).spatial))


def _hold_nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among them, or in a list among them, is nested. Asked before every op: lists of numbers are not looked into."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, DTensor):
            if is_nested(arg):
                return True
        elif isinstance(arg, (list, tuple)) and arg and not isinstance(arg[0], int) and any(map(is_nested, arg)):
            return True
    return False


def may_nest(extent: int, sizes: Iterable[int]) -> bool:
    """Whether chunks of a dim, chunked again, are as long as one another: then a view that splits or merges it moves no rows."""
    return extent > 0 and extent % math.prod(sizes) == 0


def _flat_placements(op: Op, tensor: DTensor) -> Placements:
    """Placements with one axis for a dim: the inner axes cut the dim behind it of an image, W for H, or the images, or the longest
    dim that has rows for all ranks.

    Where there is none they cut nothing, with notice.
    """
    spec = spec_of(tensor)
    sizes, shape = axes_of(spec.mesh).sizes, tensor.shape
    placements: list[Placement] = list(spec.placements)
    held = {p.dim for p in placements if plain_shard(p)}
    seen: set[int] = set()
    for axis, placement in enumerate(spec.placements):
        if not plain_shard(placement):
            continue
        if placement.dim not in seen:
            seen.add(placement.dim)
            continue
        behind = placement.dim + 1
        free = [dim for dim in range(len(shape)) if dim not in held and shape[dim] >= sizes[axis]]
        if len(shape) >= 4 and behind in free:
            placements[axis] = Shard(behind)
        elif 0 not in held and shape[0] % sizes[axis] == 0:
            placements[axis] = Shard(0)
        elif free:
            placements[axis] = Shard(max(free, key=lambda dim: shape[dim]))
        else:
            placements[axis] = Replicate()
            continue
        held.add(placements[axis].dim)  # type: ignore[attr-defined]
    wanted = tuple(placements)
    if gathers(spec.placements, wanted):
        notice.gathering(op, tensor.shape, tensor.dtype)
    return wanted


def flat(op: Op, tensor: DTensor) -> DTensor:
    """The tensor with one axis for a dim; outside autograd."""
    return recut_tensor(tensor, _flat_placements(op, tensor))


def flat_recorded(op: Op, leaf: Any) -> Any:
    """The same, recorded by autograd; anything else as it is."""
    return Recut.apply(leaf, _flat_placements(op, leaf)) if is_nested(leaf) else leaf


def guarded(handler: Handler) -> Handler:
    """`handler`, but given such tensors only where it takes them."""
    if handler in _takers and _takers[handler] is None:
        return handler
    untouched = _takers.get(handler)

    def guard(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _hold_nested(args, kwargs):
            return handler(op, args, kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_nested(leaf)]
        dims = {dim for leaf in leaves for dim in nested_dims(spec_of(leaf).placements)}
        if untouched is not None and untouched(op, args, kwargs, dims):
            return handler(op, args, kwargs)
        return _of_flat(op, handler, args, kwargs)

    return guard


def guarded_composite(handler: Handler) -> Handler:
    """The same of a rule made of differentiable ops."""
    if handler in _takers:
        return handler

    def guard(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _hold_nested(args, kwargs):
            args, kwargs = pytree.tree_map(lambda leaf: flat_recorded(op, leaf), (args, kwargs))
        return handler(op, args, kwargs)

    return guard


def _of_flat(op: Op, handler: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made: dict[int, DTensor] = {}

    def flatten(leaf: Any) -> Any:
        if not is_nested(leaf):
            return leaf
        return made.setdefault(id(leaf), flat(op, leaf))

    flat_args, flat_kwargs = pytree.tree_map(flatten, (args, kwargs))
    results = handler(op, flat_args, flat_kwargs)
    if op._schema.is_mutable:
        given = {id(made[id(leaf)]): leaf for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in made}
        for leaf in given.values():
            put_into(made[id(leaf)], leaf)
        return pytree.tree_map(lambda result: given.get(id(result), result), results)
    if op.is_view and is_nested(args[0]):
        several = isinstance(results, (list, tuple))
        for index, part in enumerate(results if several else [results]):
            _link(op, handler, args[0], part, (flat_args[1:], flat_kwargs), index if several else None)
    return results


def _link(op: Op, handler: Handler, whole: DTensor, part: DTensor, others: Any, index: int | None) -> None:
    """What is written into a view of a tensor that was moved for it reaches the tensor, and the other way round."""

    def view_of(tensor: DTensor) -> DTensor:
        views = handler(op, (tensor, *others[0]), others[1])
        return views if index is None else views[index]

    linked_by_way(whole, part, view_of, lambda whole: flat(op, whole), put_into)
