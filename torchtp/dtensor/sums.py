"""Tensors that are still to be summed, as derivatives leave them: what is written into one, or into a view of it, is written into the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchtp.dtensor.cut import axes_of, sums_done
from torchtp.dtensor.moving import recut_tensor
from torchtp.dtensor.parts import is_linked, linked_by_way
from torchtp.dtensor.upstream import DTensor, Op, Partial, local_of, spec_of

Handler = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]

aten = torch.ops.aten

_OF_SHAPE = {"unsqueeze_", "squeeze_", "transpose_", "t_", "detach_", "resize_", "set_", "as_strided_"}
_OF_ONE_SUMMAND = {aten.neg_.default, aten.zero_.default}
_BY_A_NUMBER = {aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar}
_OF_TWO_SUMMANDS = {aten.add_.Tensor, aten.sub_.Tensor, aten.copy_.default}


def holds_sum(tensor: Any) -> bool:
    """Whether a tensor on a mesh that cuts images is still to be summed over some of its axes."""
    if not isinstance(tensor, DTensor):
        return False
    spec = spec_of(tensor)
    if not any(isinstance(place, Partial) for place in spec.placements):
        return False
    axes = axes_of(spec.mesh)
    return bool(axes.spatial and axes.ranks)


def sum_done(tensor: DTensor) -> DTensor:
    """The sum, in memory of its own; outside autograd."""
    return recut_tensor(tensor, sums_done(spec_of(tensor).placements))


def write_into_sum(op: Op, handler: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `handler` does for an op that writes into args[0], which holds a sum."""
    target: DTensor = args[0]
    if op._schema.name.removeprefix("aten::") in _OF_SHAPE:
        return handler(op, args, kwargs)
    if _is_of_summands(op, args, kwargs):
        op(*map(_summand, args), **kwargs)
        return target
    whole = sum_done(target)
    handler(op, (whole, *args[1:]), kwargs)
    _put(whole, target)
    return target


def link_views(op: Op, handler: Handler, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
    """See to it that what is written into the views of args[0], which holds a sum, reaches it where they are copies of the sum."""
    whole: DTensor = args[0]
    memory = local_of(whole).untyped_storage().data_ptr()
    several = isinstance(results, (list, tuple))
    for index, part in enumerate(results if several else [results]):
        if not isinstance(part, DTensor) or is_linked(part) or local_of(part).untyped_storage().data_ptr() == memory:
            continue
        _link(op, handler, whole, part, (args[1:], kwargs), index if several else None)


def _link(op: Op, handler: Handler, whole: DTensor, part: DTensor, others: Any, index: int | None) -> None:
    def view_of(whole: DTensor) -> DTensor:
        views = handler(op, (whole, *others[0]), others[1])
        return views if index is None else views[index]

    linked_by_way(whole, part, view_of, sum_done, _put)


def _put(done: DTensor, target: DTensor) -> None:
    """The sum goes into the summand of the first rank, in place: others may be views of the same memory."""
    spec = spec_of(target)
    ranks = axes_of(spec.mesh).ranks
    summed = [axis for axis, p in enumerate(spec.placements) if isinstance(p, Partial) and p.reduce_op == "sum"]
    if any(ranks[axis] for axis in summed):
        local_of(target).zero_()
    else:
        local_of(target).copy_(local_of(done))


def _is_of_summands(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op, done to each summand, is done to the sum."""
    if op in _OF_ONE_SUMMAND:
        return True
    if op in _BY_A_NUMBER:
        return not isinstance(args[1], torch.Tensor)
    if op not in _OF_TWO_SUMMANDS:
        return False
    target, other = args[:2]
    alike = isinstance(other, DTensor) and other.device_mesh == target.device_mesh and other.shape == target.shape
    return alike and spec_of(other).placements == spec_of(target).placements


def _summand(arg: Any) -> Any:
    return local_of(arg) if isinstance(arg, DTensor) else arg
