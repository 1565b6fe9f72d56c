"""Softmax, its logarithm and logsumexp of cut DTensors: along a cut dim the ranks share largest values and sums."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtp.dtensor.agreed import check_fractions
from torchtp.dtensor.cut import dim_of
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.along import along_whole_dim, along_whole_dim_backward
from torchtp.dtensor.rules.reduction import Reduced, wide
from torchtp.dtensor.rules.shape import taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DTensor, Op, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap_in_format


def _is_cut_along(tensor: Any, dims: Any) -> bool:
    if not taken(tensor):
        return False
    of = {dim_of(dim, tensor.dim()) for dim in ([dims] if isinstance(dims, int) else dims)}
    return any(plain_shard(placement) and placement.dim in of for placement in spec_of(tensor).placements)


def _like(local: torch.Tensor, to: Reduced, tensor: DTensor) -> DTensor:
    return wrap_in_format(local, to.mesh, to.cut, tensor.shape)


class _Exponentials:
    """exp(x - m) of this rank's values, and the sum over the whole of `dims`, kept; m: the largest value there."""

    def __init__(self, to: Reduced, values: torch.Tensor, infinite: bool):
        largest = self._largest(to, values)
        # Of nothing but infinities softmax is NaN; logsumexp is the infinity.
        self.largest = largest.masked_fill(largest.isinf(), 0) if infinite else largest
        self.shifted = values - self.largest
        self.values = self.shifted.exp()
        self.total = to.total(self.values.sum(to.dims, keepdim=True))

    @staticmethod
    def _largest(to: Reduced, values: torch.Tensor) -> torch.Tensor:
        if all(values.size(dim) for dim in to.dims):
            return to.total(values.amax(to.dims, keepdim=True), "max")
        sizes = [1 if dim in to.dims else size for dim, size in enumerate(values.shape)]
        return to.total(values.new_full(sizes, -math.inf), "max")


@spatial_rule("_safe_softmax")
@takes_nested
def safe_softmax(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Softmax, but 0 where all is masked: attention's, where it has no kernel of its own."""
    tensor, dim, dtype = bound(op, args, kwargs)
    if not _is_cut_along(tensor, dim):
        return along_whole_dim(op, args, kwargs)
    to = Reduced(tensor, dim, keepdim=True)
    local = to.local.to(dtype or to.local.dtype)
    of = _Exponentials(to, local.to(wide(local.dtype)), infinite=True)
    result = (of.values / of.total).masked_fill(of.total == 0, 0)
    return _like(result.to(local.dtype), to, tensor)


@spatial_rule("_softmax", "_log_softmax")
@takes_nested
def softmax(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, widens = bound(op, args, kwargs)
    check_fractions(op, tensor)
    if not _is_cut_along(tensor, dim):
        return along_whole_dim(op, args, kwargs)
    to = Reduced(tensor, dim, keepdim=True)
    of = _Exponentials(to, to.local.to(wide(to.local.dtype)), infinite=False)
    result = of.shifted - of.total.log() if "log" in op.name() else of.values / of.total
    return _like(result.to(torch.float32 if widens else to.local.dtype), to, tensor)


@spatial_rule("logsumexp")
@takes_nested
def logsumexp(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims, keepdim = bound(op, args, kwargs)
    if not _is_cut_along(tensor, dims) or not tensor.is_floating_point():
        return along_whole_dim(op, args, kwargs)
    to = Reduced(tensor, dims, keepdim)
    of = _Exponentials(to, to.local.to(wide(to.local.dtype)), infinite=True)
    result = of.total.log().add(of.largest).to(to.local.dtype)
    return to.wrap(result if keepdim else result.squeeze(to.dims))


@spatial_rule("_softmax_backward_data", "_log_softmax_backward_data")
@takes_nested
def softmax_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, output, dim, dtype = bound(op, args, kwargs)
    if not is_spatial(output) and taken(grad):
        of_grad = Reduced(grad, dim, keepdim=True)
        output = _like(local_as(output, of_grad.mesh, of_grad.cut), of_grad, grad)
        args, kwargs = (grad, output, dim, dtype), {}
    if not _is_cut_along(output, dim):
        return along_whole_dim_backward(op, args, kwargs)
    to = Reduced(output, dim, keepdim=True)
    made = to.local.to(wide(to.local.dtype))
    given = local_as(grad, to.mesh, to.cut).to(made.dtype)
    if "log" in op.name():
        result = given - made.exp() * to.total(given.sum(to.dims, keepdim=True))
    else:
        product = given * made
        result = product - made * to.total(product.sum(to.dims, keepdim=True))
    return _like(result.to(dtype), to, output)
