"""torchvision's deform_conv2d of cut images: each rank pulls the rows and columns that its part of the offsets points at, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, full_of, interval, plain_cuts
from torchtp.dtensor.registry import bound, library_rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.reduction import wide
from torchtp.dtensor.rules.window import Window
from torchtp.dtensor.sharing import hand_out, local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, plain_shard, spec_of
from torchtp.dtensor.wrapping import parameter_gradient, wrap

_CUT_DIMS = {0, 2, 3}
_TWO = 2  # dims of an image


@dataclass
class _Call:
    """The arguments of the op."""

    input: Any
    weight: Any
    offset: Any
    mask: Any  # of no meaning unless `masked`
    bias: Any
    strides: list[int]
    paddings: list[int]
    dilations: list[int]
    groups: int
    offset_groups: int
    masked: bool

    @staticmethod
    def of(input: Any, weight: Any, offset: Any, mask: Any, bias: Any, *params: Any) -> _Call:
        numbers, (groups, offset_groups, masked) = list(params[:6]), params[6:]
        by_two = (numbers[:2], numbers[2:4], numbers[4:])
        return _Call(input, weight, offset, mask, bias, *by_two, groups, offset_groups, masked)

    def meeting(self) -> tuple[DeviceMesh, Placements] | None:
        """The mesh, and how all images are to be cut on it: as the first that is; None where one does not fit."""
        images = [self.input, self.offset, *([self.mask] if self.masked else [])]
        lead = next((image for image in images if is_spatial(image)), None)
        if lead is None or any(image.dim() != 2 + _TWO or image.dtype != lead.dtype for image in images):
            return None
        mesh = lead.device_mesh
        placements = plain_cuts(spec_of(lead).placements)
        dims = [place.dim for place in placements if plain_shard(place)]
        others = (tensor.device_mesh for tensor in (*images, self.weight, self.bias) if isinstance(tensor, DTensor))
        alike = all(other == mesh for other in others)
        if not alike or len(set(dims)) < len(dims) or not _CUT_DIMS.issuperset(dims) or not self._is_possible():
            return None
        return mesh, placements

    def reach(self, side: int) -> int:
        return self.dilations[side] * (self.weight.size(2 + side) - 1) + 1

    def _is_possible(self) -> bool:
        """Whether numbers of rows and channels fit; the op itself says what is wrong with others."""
        kernel = self.weight.shape[2:].numel()
        fits = [self.offset.size(1) == 2 * self.offset_groups * kernel, self.input.size(0) == self.offset.size(0) > 0]
        if self.masked:
            fits += [self.mask.size(1) == self.offset_groups * kernel, self.mask.shape[2:] == self.offset.shape[2:]]
        for side in range(_TWO):
            rows = self.input.size(2 + side) + 2 * self.paddings[side] - self.reach(side)
            fits.append(rows >= 0 and rows // self.strides[side] + 1 == self.offset.size(2 + side))
        return all(fits)


@dataclass
class _Pulled:
    """The window of the input that this rank samples, and its part of the offsets as seen from there."""

    mesh: DeviceMesh
    placements: Placements  # of the input, the offsets, the mask and the output
    window: Window
    image: torch.Tensor  # what is in it, of the dtype that is computed in
    offset: torch.Tensor
    mask: torch.Tensor
    geometry: list[int]  # strides, paddings and dilations that make as many rows of the window as this rank has offsets


def _fitting(rows: int, reach: int, wanted: int, stride: int) -> tuple[int, int]:
    """A stride and a padding by which a kernel that reaches over `reach` of `rows` makes `wanted` rows: offsets do the rest."""
    for by in (stride, max(2, (rows - reach) // max(1, wanted) + 1)):
        padding = max(0, -(-((wanted - 1) * by + reach - rows) // 2))
        if (rows + 2 * padding - reach) // by + 1 == wanted:
            break
    return by, padding


def _pulled(call: _Call, mesh: DeviceMesh, placements: Placements) -> _Pulled:
    input, dtype = call.input, wide(call.input.dtype)
    window = Window(local_as(input, mesh, placements), mesh, placements, input.shape)
    own = local_as(call.offset, mesh, placements).to(dtype)
    mask = local_as(call.mask, mesh, placements).to(dtype) if call.masked else own.new_zeros([own.size(0), 1])
    by_tap = own.unflatten(1, (call.offset_groups, *call.weight.shape[2:], _TWO))  # the last of them is y and x
    strides, paddings, moved = list(call.strides), list(call.paddings), list(by_tap.unbind(4))
    for side in range(_TWO):
        dim = 2 + side
        if not window.is_cut(dim):
            continue
        wanted = own.size(dim)
        along, of_tap = ([-1, 1], [-1, 1, 1, 1]) if side == 0 else ([-1], [-1, 1, 1])
        rows, taps = (torch.arange(n, device=own.device, dtype=dtype) for n in (wanted, call.weight.size(dim)))
        begin = interval(mesh, placements, dim, call.offset.size(dim))[0]
        places = (rows + begin) * strides[side] - paddings[side]
        pixels = moved[side] + (places.view(along) + (taps * call.dilations[side]).view(of_tap))
        places -= window.pull(dim, pixels)
        strides[side], paddings[side] = _fitting(window.local.size(dim), call.reach(side), wanted, strides[side])
        moved[side] = moved[side] + (places - (rows * strides[side] - paddings[side])).view(along)
    offset = torch.stack(moved, 4).flatten(1, 4)
    geometry = [*strides, *paddings, *call.dilations]
    return _Pulled(mesh, placements, window, window.local.to(dtype), offset, mask, geometry)


@library_rule("torchvision::deform_conv2d")
def deform_conv2d(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _Call.of(*bound(op, args, kwargs))
    meeting = call.meeting()
    if meeting is None:
        return unruled(op, args, kwargs)
    for parameter in (call.weight, call.bias):
        if not isinstance(parameter, DTensor):
            hand_out(parameter)
    pulled = _pulled(call, *meeting)
    weight, bias = (full_of(parameter).to(pulled.image.dtype) for parameter in (call.weight, call.bias))
    shape = torch.Size([call.input.size(0), call.weight.size(0), *call.offset.shape[2:]])
    if pulled.offset.numel():
        groups = (call.groups, call.offset_groups, call.masked)
        local = op(pulled.image, weight, pulled.offset, pulled.mask, bias, *pulled.geometry, *groups)
    else:
        local = pulled.image.new_empty([pulled.offset.size(0), shape[1], *pulled.offset.shape[2:]])
    return wrap(local.to(call.input.dtype), pulled.mesh, pulled.placements, shape)


@library_rule("torchvision::_deform_conv2d_backward")
def deform_conv2d_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, *given = bound(op, args, kwargs)
    call = _Call.of(*given)
    meeting = call.meeting()
    if meeting is None:
        return unruled(op, args, kwargs)
    mesh, placements = meeting
    pulled = _pulled(call, mesh, placements)
    local = local_as(grad, mesh, placements).to(pulled.image.dtype)
    weight, bias = (full_of(parameter).to(local.dtype) for parameter in (call.weight, call.bias))
    of_tensors = (pulled.image, weight, pulled.offset, pulled.mask, bias)
    if pulled.offset.numel():
        groups = (call.groups, call.offset_groups, call.masked)
        grads = op(local.contiguous(), *of_tensors, *pulled.geometry, *groups)
    else:
        grads = tuple(torch.zeros_like(tensor) for tensor in of_tensors)
    grads = (pulled.window.give_back(grads[0]), *grads[1:])
    of_input, of_weight, of_offset, of_mask, of_bias = (
        one.to(tensor.dtype) for one, tensor in zip(grads, given[:5], strict=True)
    )
    return (
        wrap(of_input, mesh, placements, call.input.shape),
        parameter_gradient(of_weight, call.weight, mesh, placements),
        wrap(of_offset, mesh, placements, call.offset.shape),
        wrap(of_mask, mesh, placements, call.mask.shape) if call.masked else torch.zeros_like(call.mask),
        parameter_gradient(of_bias, call.bias, mesh, placements),
    )
