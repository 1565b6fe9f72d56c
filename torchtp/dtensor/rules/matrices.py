"""Matrices in the last dims of cut DTensors, one at each place say: every rank takes its own, and of a cut one its rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor import notice
from torchtp.dtensor.agreed import on_all_parts
from torchtp.dtensor.cut import Placements, axes_cutting, dim_of, full_of, interval, sums_done
from torchtp.dtensor.moving import recut_tensor
from torchtp.dtensor.nesting import takes_nested_if
from torchtp.dtensor.registry import bound, spatial_rule, words
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.rules.shape import axis_cutting, summed, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate, Shard, local_of, on_plain, plain_shard
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
        on_all_parts(op, local_of(lead), lambda: on_plain(op, parts, named), mesh, placements),
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
    results = on_plain(op, (part.contiguous() if tensor.is_contiguous() else part.mT.contiguous().mT,), {})
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
    matrix = (tensor.dim() - 2, tensor.dim() - 1)
    result = op(local, _own_offset(mesh, placements, diagonal, matrix, tensor.shape))
    return tensor if op._schema.is_mutable else wrap(result, mesh, placements, tensor.shape)


def _placed(placements: Any, places: list[int | None]) -> Any:
    """The placements of a tensor for each of whose dims `places` says which dim of another one it is; None: of none."""
    return tuple(Shard(places.index(p.dim)) if plain_shard(p) else p for p in placements)


def _own_offset(
    mesh: DeviceMesh, placements: Placements, offset: int, dims: Sequence[int], shape: Sequence[int]
) -> int:
    """Where a diagonal of the two dims, rows and columns, lies in this rank's part."""
    row, column = (interval(mesh, placements, dim, shape[dim])[0] for dim in dims)
    return offset + row - column


def _goes_with_part(placements: Placements, offset: int, dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether ranks hold parts of a diagonal that go with their rows or columns: it is the main one where one is cut, the shorter."""
    cut = [dim for dim in dims if axes_cutting(placements, {dim})]
    return not cut or (len(cut) == 1 and offset == 0 and shape[cut[0]] == min(shape[dim] for dim in dims))


def _is_held(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
    tensor, offset, *of_matrix = bound(op, args, kwargs)
    of_matrix = [dim_of(dim, tensor.dim()) for dim in of_matrix]
    return _goes_with_part(tensor.placements, offset, of_matrix, tensor.shape)


@spatial_rule("diagonal")
@takes_nested_if(_is_held)
def diagonal(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, offset, *dims = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    dims = [dim_of(dim, tensor.dim()) for dim in dims]
    mesh, placements = tensor.device_mesh, tensor.placements
    if not _goes_with_part(placements, offset, dims, tensor.shape):
        return unruled(op, args, kwargs)
    cut = next((dim for dim in dims if axes_cutting(placements, {dim})), None)
    part = op(local_of(tensor), _own_offset(mesh, placements, offset, dims, tensor.shape), *dims)
    left = [dim for dim in range(tensor.dim()) if dim not in dims]
    shape = torch.Size([*(tensor.size(dim) for dim in left), part.size(-1) if cut is None else tensor.size(cut)])
    stride = (*(tensor.stride(dim) for dim in left), sum(tensor.stride(dim) for dim in dims))
    return wrap(part, mesh, _placed(placements, [*left, cut]), shape, stride)


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


def _has_rows(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
    grad, _, offset, *_ = bound(op, args, kwargs)
    return dims != {grad.dim() - 1} or offset == 0


@spatial_rule("diagonal_backward")
@takes_nested_if(_has_rows)
def diagonal_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, offset, *dims = bound(op, args, kwargs)
    if not taken(grad):
        return unruled(op, args, kwargs)
    dims = [dim % len(sizes) for dim in dims]
    if not axes_cutting(grad.placements, {grad.dim() - 1}):
        return _embedded(grad, offset, dims, sizes)
    if offset != 0:
        return unruled(op, args, kwargs)
    return _embedded(grad, offset, dims, sizes, min(dims, key=lambda dim: sizes[dim]))


def _embedded(tensor: DTensor, offset: int, dims: list[int], sizes: Any, rows: int | None = None) -> DTensor:
    """The last dim on a diagonal of zeros, of the extents that `sizes` has there or as large as it has to be.

    Where it is cut, so is `rows`, which is as long.
    """
    local, mesh, placements = summed(tensor)
    last = tensor.dim() - 1
    left = iter(range(last))
    places = [last if dim == rows else None if dim in dims else next(left) for dim in range(tensor.dim() + 1)]
    extent = tensor.size(-1) + abs(offset)
    shape = [extent if place is None else tensor.size(place) for place in places] if sizes is None else list(sizes)
    placed = _placed(placements, places)
    result = local.new_zeros([shape[dim] if place is None else local.size(place) for dim, place in enumerate(places)])
    result.diagonal(_own_offset(mesh, placed, offset, dims, shape), *dims).copy_(local)
    return wrap(result, mesh, placed, torch.Size(shape))
