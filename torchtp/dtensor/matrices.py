"""Matrices in the last dims of cut DTensors, one at each place say: every rank takes its own, and of a cut one its rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, axes_cutting, dim_of, full_of, interval, sums_done
from torchtp.dtensor.fallback import has_strided_shard, unruled
from torchtp.dtensor.moving import chunk_of, recut_tensor
from torchtp.dtensor.nesting import takes_nested_if
from torchtp.dtensor.registry import bound, spatial_rule, words
from torchtp.dtensor.shape import axis_cutting, summed, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate, Shard, local_of, plain_shard
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten


@spatial_rule(*words("""
    linalg_inv_ex _linalg_solve_ex linalg_cholesky_ex linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_qr _linalg_svd linalg_eig _linalg_eigvals _linalg_eigh linalg_matrix_exp cholesky_solve
    linalg_solve_triangular linalg_ldl_factor_ex linalg_householder_product cholesky_inverse
"""))  # fmt: skip
def each_matrix(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of matrices that are whole, one at each place say, every rank takes its own."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    lead = next((tensor for tensor in tensors if isinstance(tensor, DTensor) and taken(tensor)), None)
    if lead is None:
        return unruled(op, args, kwargs)
    batch = lead.shape[: lead.dim() - 2]
    if any(plain_shard(p) and p.dim >= len(batch) for p in lead.placements) or any(
        tensor.shape[: len(batch)] != batch or has_strided_shard(tensor) for tensor in tensors
    ):
        return unruled(op, args, kwargs)
    mesh, placements = lead.device_mesh, sums_done(lead.placements)
    parts, named = pytree.tree_map_only(torch.Tensor, lambda tensor: local_as(tensor, mesh, placements), (args, kwargs))
    return pytree.tree_map_only(
        torch.Tensor,
        lambda part: wrap(part, mesh, placements, torch.Size([*batch, *part.shape[len(batch) :]])),
        op(*parts, **named),
    )


@spatial_rule("_linalg_det", "_linalg_slogdet")
def determinant(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Factors the transpose of what is contiguous, and its derivative goes by the strides of the DTensor: parts lie as these say."""
    (tensor,) = args
    if not taken(tensor):
        return unruled(op, args, kwargs)
    placements = sums_done(tensor.placements)
    whole = tuple(Replicate() if plain_shard(p) and p.dim >= tensor.dim() - 2 else p for p in placements)
    if whole != placements:
        notice.gathering(op, tensor.shape, tensor.dtype)
    part = local_as(tensor, tensor.device_mesh, whole)
    batch = tensor.shape[:-2]
    results = op(part.contiguous() if tensor.is_contiguous() else part.mT.contiguous().mT)
    given = [wrap(each, tensor.device_mesh, whole, torch.Size([*batch, *each.shape[len(batch) :]])) for each in results]
    return tuple(recut_tensor(each, placements) if each.dim() == tensor.dim() else each for each in given)


@spatial_rule("_linalg_check_errors")
def check_errors(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises on all ranks where a matrix of any rank is at fault; only then are the codes brought together, to say which."""
    info, *others = args
    if not taken(info):
        return unruled(op, args, kwargs)
    if not info.is_meta and info.any():
        op(full_of(info).contiguous(), *others, **kwargs)
    return None


@spatial_rule("tril", "triu", "tril_", "triu_")
def triangle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows and columns count from the first ones of the whole."""
    tensor, diagonal = bound(op, args, kwargs)
    if not taken(tensor) or tensor.dim() < 2:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    if op._schema.is_mutable and local is not local_of(tensor):  # a sum is not written into summand by summand
        return unruled(op, args, kwargs)
    for dim, sign in ((tensor.dim() - 2, 1), (tensor.dim() - 1, -1)):
        axis = axis_cutting(placements, dim)
        if axis is not None:
            diagonal += sign * chunk_of(mesh, axis, tensor.size(dim))[0]
    result = op(local, diagonal)
    return tensor if op._schema.is_mutable else wrap(result, mesh, placements, tensor.shape)


def _placed(placements: Any, places: list[int | None]) -> Any:
    """The placements of a tensor for each of whose dims `places` says which dim of another one it is; None: of none."""
    return tuple(Shard(places.index(p.dim)) if plain_shard(p) else p for p in placements)


def _cut_side(placements: Placements, offset: int, dims: list[int], shape: Sequence[int]) -> int | None:
    """Which of a diagonal's two dims is cut: 0, 1, or -1 for none. None where ranks do not hold the parts of the diagonal that go with their rows."""
    cut = [side for side, dim in enumerate(dims) if axes_cutting(placements, {dim})]
    if not cut:
        return -1
    (side, *more), extents = cut, [shape[dim] for dim in dims]
    return None if more or offset != 0 or extents[side] > extents[1 - side] else side


def _lies_with_rows(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
    tensor, offset, *of_matrix = bound(op, args, kwargs)
    of_matrix = [dim_of(dim, tensor.dim()) for dim in of_matrix]
    return _cut_side(tensor.placements, offset, of_matrix, tensor.shape) is not None


@spatial_rule("diagonal")
@takes_nested_if(_lies_with_rows)
def diagonal(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, offset, *dims = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    dims = [dim_of(dim, tensor.dim()) for dim in dims]
    mesh, placements = tensor.device_mesh, tensor.placements
    side = _cut_side(placements, offset, dims, tensor.shape)
    if side is None:
        return unruled(op, args, kwargs)
    part = op(local_of(tensor), _own_offset(mesh, placements, offset, dims, side, tensor.shape), *dims)
    left = [dim for dim in range(tensor.dim()) if dim not in dims]
    shape = torch.Size([*(tensor.size(dim) for dim in left), tensor.size(dims[side]) if side >= 0 else part.size(-1)])
    stride = (*(tensor.stride(dim) for dim in left), sum(tensor.stride(dim) for dim in dims))
    return wrap(part, mesh, _placed(placements, [*left, dims[side] if side >= 0 else None]), shape, stride)


def _own_offset(
    mesh: DeviceMesh, placements: Placements, offset: int, dims: list[int], side: int, shape: Sequence[int]
) -> int:
    """Of the diagonal in this rank's rows or columns."""
    if side < 0:
        return offset
    begin, _ = interval(mesh, placements, dims[side], shape[dims[side]])
    return begin if side == 0 else -begin


@spatial_rule("diagonal_scatter")
def diagonal_scatter(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, source, *where = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    result = aten.clone(tensor)
    aten.copy_(aten.diagonal(result, *where), source)
    return result


@spatial_rule("diag_embed")
def diag_embed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, offset, *dims = bound(op, args, kwargs)
    if not taken(tensor) or axis_cutting(tensor.placements, tensor.dim() - 1) is not None:
        return unruled(op, args, kwargs)
    return _embedded(tensor, offset, [dim % (tensor.dim() + 1) for dim in dims], None)


def _goes_with_rows(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
    grad, sizes, offset, *of_matrix = bound(op, args, kwargs)
    return dims != {grad.dim() - 1} or _rows_of(sizes, offset, [dim % len(sizes) for dim in of_matrix]) is not None


def _rows_of(sizes: Sequence[int], offset: int, dims: list[int]) -> int | None:
    """The dim of a matrix that a cut diagonal is cut along; None where there is none as long as it."""
    extents = [sizes[dim] for dim in dims]
    return None if offset != 0 else dims[extents.index(min(extents))]


@spatial_rule("diagonal_backward")
@takes_nested_if(_goes_with_rows)
def diagonal_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, offset, *dims = bound(op, args, kwargs)
    if not taken(grad):
        return unruled(op, args, kwargs)
    dims = [dim % len(sizes) for dim in dims]
    if not axes_cutting(grad.placements, {grad.dim() - 1}):
        return _embedded(grad, offset, dims, sizes)
    rows = _rows_of(sizes, offset, dims)
    if rows is None:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(grad)
    others = iter(range(grad.dim() - 1))
    places = [grad.dim() - 1 if dim == rows else None if dim in dims else next(others) for dim in range(len(sizes))]
    placed = _placed(placements, places)
    result = local.new_zeros([sizes[dim] if place is None else local.size(place) for dim, place in enumerate(places)])
    own = _own_offset(mesh, placed, offset, dims, dims.index(rows), sizes)
    result.diagonal(own, *dims).copy_(local)
    return wrap(result, mesh, placed, torch.Size(sizes))


def _embedded(tensor: DTensor, offset: int, dims: list[int], sizes: Any) -> DTensor:
    """The last dim on a diagonal of zeros, of the extents that `sizes` has there or as large as it has to be."""
    local, mesh, placements = summed(tensor)
    left = iter(range(tensor.dim() - 1))
    places = [None if dim in dims else next(left) for dim in range(tensor.dim() + 1)]
    extent = tensor.size(-1) + abs(offset)
    shape = [extent if place is None else tensor.size(place) for place in places] if sizes is None else list(sizes)
    own = [shape[dim] if place is None else local.size(place) for dim, place in enumerate(places)]
    result = local.new_zeros(own)
    result.diagonal(offset, *dims).copy_(local)
    return wrap(result, mesh, _placed(placements, places), torch.Size(shape))
