"""Convolutions of cut DTensors, forward and backward to any order; weights may be plain or replicated."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor import notice
from torchtp.dtensor.cut import cut_of, full_of
from torchtp.dtensor.nesting import is_nested, takes_nested_if
from torchtp.dtensor.registry import bound, composite_rule, named_arguments, rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.pooling import each
from torchtp.dtensor.sharing import hand_out_alike, local_as
from torchtp.dtensor.spatial import arrange, is_marked, is_spatial, mark
from torchtp.dtensor.upstream import DTensor, Op, passthrough, taken_apart
from torchtp.dtensor.wrapping import parameter_gradient, wrap

ops = torch.ops.torchtp
aten = torch.ops.aten


def _not_channels(dim: int) -> bool:
    return dim != 1


def _takes(input: Any, weight: Any) -> bool:
    """Ours: a cut input, and what follows one (after global pooling the weights are as plain as before)."""
    if not isinstance(input, DTensor) or input.dim() < 3:
        return False
    return cut_of(input.device_mesh, input.placements, input.shape) is not None or (
        not isinstance(weight, DTensor) or is_marked(input.device_mesh)
    )


def _left(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is not ours: a whole input beside a weight that was made of cut activations, or another mesh."""
    marked = any(isinstance(arg, DTensor) and is_marked(arg.device_mesh) for arg in args)
    return (unruled if marked else passthrough)(op, args, kwargs)


def _whole(op: Op, weight: torch.Tensor) -> torch.Tensor:
    """The weight on every rank; a cut one, a template that is looked for in an image, is gathered with notice."""
    if is_spatial(weight):
        notice.gathering(op, weight.shape, weight.dtype)
    return full_of(weight)


def _output_shape(
    input: torch.Size, weight: torch.Size, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> torch.Size:  # fmt: skip
    shape = [input[0], weight[1] * groups if transposed else weight[0]]
    for i in range(len(input) - 2):
        reach = dilation[i] * (weight[i + 2] - 1)
        if transposed:
            shape.append((input[i + 2] - 1) * stride[i] - 2 * padding[i] + reach + 1 + output_padding[i])
        else:
            shape.append((input[i + 2] + 2 * padding[i] - reach - 1) // stride[i] + 1)
    return torch.Size(shape)


def _for_each_dim(num_dims: int, params: list[Any]) -> list[Any]:
    """Stride, padding, dilation and output padding with a number for each dim; padding="valid" comes as one zero for all."""
    stride, padding, dilation, transposed, output_padding, groups = params
    if len(stride) == len(padding) == len(dilation) == len(output_padding) == num_dims:
        return params
    stride, padding, dilation, output_padding = (
        each(values, num_dims) for values in (stride, padding, dilation, output_padding)
    )
    return [stride, padding, dilation, transposed, output_padding, groups]


def _of_single_pixels(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
    """Whether each pixel is made of the one at its place, so that ranks may hold any."""
    named = named_arguments(op, args, kwargs)
    return (
        1 not in dims
        and set(named["weight"].shape[2:]) == {1}
        and set(named["stride"]) == {1}
        and set(named["padding"]) | set(named["output_padding"]) == {0}
    )


@rule("convolution")
@takes_nested_if(_of_single_pixels)
def convolution(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, weight, bias, *params = bound(op, args, kwargs)
    nested = is_nested(input)
    if not nested and not _takes(input, weight):
        return _left(op, args, kwargs)
    params = _for_each_dim(input.dim() - 2, params)
    hand_out_alike(op, weight, bias)
    local, mesh, placements = arrange(op, input, _not_channels, nested)
    weight = _whole(op, weight)
    bias = None if bias is None else full_of(bias)
    cut = None if nested else cut_of(mesh, placements, input.shape)
    if cut is not None:
        mark(mesh, cut.axes)
        output = ops.convolution(local, weight, bias, *params, cut.dims, cut.extents, cut.groups)
    elif nested and not local.numel():  # aten refuses rows without pixels
        channels = _output_shape(input.shape, weight.shape, *params)[1]
        output = local.new_empty(local.size(0), channels, *local.shape[2:])
    else:
        output = aten.convolution(local, weight, bias, *params)
    return wrap(output, mesh, placements, _output_shape(input.shape, weight.shape, *params))  # after the op's refusals


@rule("convolution_backward")
@takes_nested_if(_of_single_pixels)
def convolution_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, weight, bias_sizes, *params, mask = bound(op, args, kwargs)
    nested = is_nested(input)
    if not nested and not _takes(input, weight):
        return _left(op, args, kwargs)
    params = _for_each_dim(input.dim() - 2, params)
    local, mesh, placements = arrange(op, input, _not_channels, nested)
    full_weight = _whole(op, weight)
    grad_output = local_as(grad_output, mesh, placements)
    cut = None if nested else cut_of(mesh, placements, input.shape)
    if cut is not None:
        grads = ops.convolution_backward(
            grad_output, local, full_weight, *params, mask, cut.dims, cut.extents, cut.groups
        )
    elif nested and not local.numel():
        grads = (local, torch.zeros_like(full_weight), local.new_zeros(bias_sizes or ()))
    else:
        grads = aten.convolution_backward(grad_output, local, full_weight, bias_sizes, *params, mask)
    grad_input, grad_weight, grad_bias = grads
    return (
        wrap(grad_input, mesh, placements, input.shape) if mask[0] else None,
        parameter_gradient(grad_weight, weight, mesh, placements) if mask[1] else None,
        parameter_gradient(grad_bias, weight, mesh, placements) if mask[2] else None,
    )


@composite_rule("_convolution_double_backward")
def convolution_double_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The derivative of convolution_backward. It is bilinear: what meets it is an input, a weight or a bias again.

    aten's own formula is a convolution whose weight is cut, and adds its DTensor result to plain gradients.
    """
    grad_grad_input, grad_grad_weight, grad_grad_bias, grad_output, weight, input, *params, mask = args
    tensors = (grad_grad_input, grad_output, input)
    if not any(isinstance(tensor, DTensor) and _takes(tensor, weight) for tensor in tensors):
        return taken_apart(op, args, kwargs)
    for_grad_output = for_input = for_weight = None
    if mask[0]:
        parts = []
        if grad_grad_input is not None:
            parts.append(aten.convolution(grad_grad_input, weight, None, *params))
        if grad_grad_weight is not None or grad_grad_bias is not None:
            kernel = torch.zeros_like(weight) if grad_grad_weight is None else grad_grad_weight
            # Not added by itself: in a backward the sum with a plain tensor is its gradient's, see `pointwise._accumulate`.
            parts.append(aten.convolution(input, kernel, grad_grad_bias, *params))
        for part in parts:
            for_grad_output = part if for_grad_output is None else for_grad_output + part
    if mask[1] and grad_grad_weight is not None:
        for_input = aten.convolution_backward(
            grad_output, input, grad_grad_weight, None, *params, [True, False, False]
        )[0]
    if mask[2] and grad_grad_input is not None:
        for_weight = aten.convolution_backward(
            grad_output, grad_grad_input, weight, None, *params, [False, True, False]
        )[1]
    return for_grad_output, for_input, for_weight
