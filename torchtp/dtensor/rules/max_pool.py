"""Max pooling of cut DTensors; differentiable to any order without a gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchtp.dtensor.cut import Cut, Placements, cut_of, is_cut
from torchtp.dtensor.own_images import takes_images_cut_twice
from torchtp.dtensor.registry import bound, composite_rule, rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.pooling import any_dim, each, pooled_shape
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import arrange, mark
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, taken_apart
from torchtp.dtensor.wrapping import Function, wrap

ops = torch.ops.torchtp

Window = tuple[list[int], list[int], list[int], list[int], bool]  # kernel_size, stride, padding, dilation, ceil_mode


def _window(num_dims: int, params: Any) -> Window:
    kernel, stride, padding, dilation, ceil = params
    kernel = each(kernel, num_dims)
    stride = each(stride, num_dims) if stride else kernel
    return kernel, stride, each(padding, num_dims), each(dilation, num_dims), ceil


@dataclass(frozen=True)
class _Pool:
    """One pooling of a cut image: what forward and backward share."""

    mesh: DeviceMesh
    placements: Placements
    cut: Cut
    window: Window
    shape: torch.Size  # of the image
    local_shape: torch.Size

    @property
    def _params(self) -> tuple[Any, ...]:
        return *self.window, self.cut.dims, self.cut.extents, self.cut.groups

    @property
    def output_shape(self) -> torch.Size:
        return pooled_shape(self.shape, *self.window)

    def wrap(self, local: torch.Tensor, shape: torch.Size) -> DTensor:
        return wrap(local, self.mesh, self.placements, shape)

    def forward(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.max_pool(local, *self._params)

    def backward(self, grad: torch.Tensor, indices: torch.Tensor) -> DTensor:
        """Every output's gradient to where its maximum lies."""
        grad = local_as(grad, self.mesh, self.placements)
        return self.wrap(ops.max_pool_backward(grad, indices, self.local_shape, *self._params), self.shape)

    def gather(self, image: torch.Tensor, indices: torch.Tensor) -> DTensor:
        """What an image has where the maxima lie."""
        local = local_as(image, self.mesh, self.placements)
        return self.wrap(ops.max_pool_gather(local, indices, *self._params), self.output_shape)


def _pool(op: Op, input: DTensor, params: Any) -> tuple[torch.Tensor, _Pool]:
    local, mesh, placements = arrange(op, input, any_dim)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    mark(mesh, cut.axes)
    return local, _Pool(mesh, placements, cut, _window(input.dim() - 2, params), input.shape, local.shape)


def _taken(op: Op, input: Any) -> bool:
    return is_cut(input) and input.dim() == int(op._schema.name.split("pool")[1][0]) + 2


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d")
@takes_images_cut_twice
def max_pool(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, *params = bound(op, args, kwargs)
    if not _taken(op, input):
        return unruled(op, args, kwargs)
    local, pool = _pool(op, input, params)
    output, indices = pool.forward(local)
    shape = pool.output_shape
    return pool.wrap(output, shape) if input.dim() == 3 else (pool.wrap(output, shape), pool.wrap(indices, shape))


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
@takes_images_cut_twice
def max_pool_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, *params, indices = bound(op, args, kwargs)
    if not _taken(op, input):
        return unruled(op, args, kwargs)
    _, pool = _pool(op, input, params)
    return pool.backward(grad_output, local_as(indices, pool.mesh, pool.placements))


class MaxPool(Function):
    """The pooling, where its indices are not asked for."""

    @staticmethod
    def forward(ctx: Any, input: DTensor, op: Op, params: Any) -> DTensor:
        local, ctx.pool = _pool(op, input, params)
        output, indices = ctx.pool.forward(local)
        ctx.save_for_backward(indices, input)
        return ctx.pool.wrap(output, ctx.pool.output_shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None]:
        return MaxPoolBackward.apply(grad, *ctx.saved_tensors, ctx.pool), None, None


class MaxPoolBackward(Function):
    """The pooling's adjoint. Its derivative by the image is zero, but it is one: as on a single device."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, indices: torch.Tensor, input: torch.Tensor, pool: _Pool) -> DTensor:
        ctx.save_for_backward(indices, input)
        ctx.pool = pool
        return pool.backward(grad, indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        indices, input = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return (
            MaxPoolGather.apply(grad, indices, ctx.pool) if wants[0] else None,
            None,
            torch.zeros_like(input) if wants[2] else None,
            None,
        )


class MaxPoolGather(Function):
    """The adjoint of the pooling's adjoint."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, indices: torch.Tensor, pool: _Pool) -> DTensor:
        ctx.save_for_backward(indices, image)
        ctx.pool = pool
        return pool.gather(image, indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None]:
        return MaxPoolBackward.apply(grad, *ctx.saved_tensors, ctx.pool), None, None


@composite_rule("max_pool1d")
@composite_rule("max_pool2d")
@composite_rule("max_pool3d")
def max_pool_without_indices(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten's own second derivative flattens the image."""
    input, *params = bound(op, args, kwargs)
    return MaxPool.apply(input, op, params) if _taken(op, input) else taken_apart(op, args, kwargs)
