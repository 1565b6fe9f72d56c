"""Ops that act element by element on several tensors: aligned to one cut, computed locally."""

from __future__ import annotations

import sys
import threading
from functools import cache, lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp._C import is_for_subclass
from torchtp.dtensor import notice
from torchtp.dtensor.agreed import on_all_parts, true_on_all
from torchtp.dtensor.cut import Placements, axes_of, cut_locally, full_of
from torchtp.dtensor.moving import gathers, recut
from torchtp.dtensor.nesting import is_nested, takes_nested
from torchtp.dtensor.registry import Handler, install, spatial_rule, words
from torchtp.dtensor.sharing import hand_out
from torchtp.dtensor.spatial import on_first_mark
from torchtp.dtensor.sums import sum_done
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    Shard,
    in_backward,
    is_composite,
    is_plain,
    local_of,
    node_in_backward,
    passthrough,
    plain_shard,
    spec_of,
)
from torchtp.dtensor.whole import contributed
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten

# PyTorch tags some of these as elementwise itself, and others besides (`rule_of_tagged`); which, depends on its version.
_FUNCTIONAL = words(
    """
    add sub rsub mul div pow maximum minimum fmax fmin atan2 masked_fill eq ne lt le gt ge logical_and
    logical_or logical_xor bitwise_and bitwise_or bitwise_xor clamp clamp_min clamp_max lerp addcmul addcdiv
    remainder fmod floor_divide hypot copysign xlogy threshold threshold_backward hardtanh hardtanh_backward
    hardswish hardswish_backward hardsigmoid hardsigmoid_backward elu_backward gelu_backward leaky_relu_backward
    log_sigmoid_forward log_sigmoid_backward mish_backward sigmoid_backward silu_backward softplus_backward
    tanh_backward logit_backward softshrink softshrink_backward hardshrink hardshrink_backward celu relu6
    _prelu_kernel _prelu_kernel_backward native_dropout_backward isclose rrelu_with_noise_backward polar complex
    bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ isin.Tensor_Scalar
    polygamma i0 special_i0e special_i1 special_i1e special_ndtri special_log_ndtr special_erfcx special_xlog1py igamma
    nextafter heaviside logaddexp logaddexp2 ldexp float_power where.self where.ScalarSelf where.ScalarOther where.Scalar
    fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    """
)
_IN_PLACE = words(
    """
    add_ sub_ mul_ div_ pow_ clamp_ clamp_min_ clamp_max_ lerp_ addcmul_ addcdiv_ remainder_ fmod_ floor_divide_
    threshold_ hardtanh_ hardswish_ hardsigmoid_ celu_ relu6_ logical_and_ logical_or_ eq_ ne_ lt_ le_ gt_ ge_
    mish_ abs_ elu_ erf_ exp_ fill_ leaky_relu_ log_ neg_ reciprocal_ relu_ rsqrt_ sigmoid_ silu_ sqrt_ tanh_
    zero_ bitwise_and_ bitwise_or_ bitwise_xor_ bitwise_not_ bitwise_left_shift_ bitwise_right_shift_
    logical_xor_ logical_not_ ceil_ floor_ round_ trunc_ frac_ sign_ sgn_ square_ exp2_ expm1_ log1p_ log2_ log10_
    sin_ cos_ tan_ asin_ acos_ atan_ sinh_ cosh_ asinh_ acosh_ atanh_ sinc_ erfc_ erfinv_ lgamma_ digamma_ logit_
    nan_to_num_ deg2rad_ rad2deg_ atan2_ hypot_ copysign_ nextafter_ heaviside_ xlogy_ float_power_ ldexp_
    """
)


# Of whole numbers these refuse 0 as a divisor.
_DIVIDING = {
    aten.div.Tensor_mode, aten.div_.Tensor_mode, aten.div.Scalar_mode, aten.div_.Scalar_mode,
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.floor_divide_.Tensor, aten.floor_divide_.Scalar,
    aten.fmod.Tensor, aten.fmod_.Tensor, aten.fmod.Scalar, aten.fmod_.Scalar,
    aten.remainder.Tensor, aten.remainder_.Tensor, aten.remainder.Scalar, aten.remainder_.Scalar,
    aten.remainder.Scalar_Tensor,
}  # fmt: skip
broadcast_shapes = lru_cache(4096)(torch.broadcast_shapes)  # which takes longer than most of what it is asked for


@spatial_rule(*_FUNCTIONAL)
@takes_nested
def pointwise(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if kwargs:
        tensors += [arg for arg in kwargs.values() if isinstance(arg, torch.Tensor)]
    lead = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
    spec = spec_of(lead)
    if all(
        isinstance(t, DTensor) and spec_of(t).placements == spec.placements and t.shape == lead.shape for t in tensors
    ):
        outside = not axes_of(spec.mesh).ranks  # of the mesh, where a rank holds nothing
        if outside:
            return passthrough(op, args, kwargs)
        if any(isinstance(placement, Partial) for placement in spec.placements):
            try:
                return passthrough(op, args, kwargs)
            except NotImplementedError:  # upstream does not know the op
                return pointwise(op, *pytree.tree_map(_sum_done, (args, kwargs)))
        mesh, placements, shape = spec.mesh, spec.placements, lead.shape
        local_args = [local_of(arg) if isinstance(arg, DTensor) else arg for arg in args]
        local_kwargs = {k: local_of(arg) if isinstance(arg, DTensor) else arg for k, arg in kwargs.items()}
    else:
        mesh = spec.mesh
        if not axes_of(mesh).spatial and all(isinstance(tensor, DTensor) for tensor in tensors):
            return passthrough(op, args, kwargs)
        shape = broadcast_shapes(*(tensor.shape for tensor in tensors))
        if in_backward() and _is_accumulation(op, tensors):
            return _accumulate(op, args, kwargs)
        placements = _common(op, tensors, shape, mesh)
        local_args = [aligned(op, arg, shape, mesh, placements) for arg in args]
        local_kwargs = {k: aligned(op, arg, shape, mesh, placements) for k, arg in kwargs.items()}
    results = _computed(op, local_args, local_kwargs, mesh, placements)
    if isinstance(results, torch.Tensor):
        return wrap(results, mesh, placements, shape)
    return tuple(wrap(result, mesh, placements, shape) for result in results)


@spatial_rule(*_IN_PLACE, "copy_", "masked_fill_")
@takes_nested
def pointwise_in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, DTensor):
        return _written_whole(op, args, kwargs)
    spec = spec_of(target)
    if not axes_of(spec.mesh).spatial:
        return passthrough(op, args, kwargs)
    mesh, placements = spec.mesh, spec.placements
    shape = broadcast_shapes(*(arg.shape for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)))
    if shape != target.shape:
        raise RuntimeError(
            f"{op}: output with shape {list(target.shape)} doesn't match the broadcast shape {list(shape)}"
        )
    local_args = [aligned(op, arg, target.shape, mesh, placements) for arg in args]
    local_kwargs = {k: aligned(op, arg, target.shape, mesh, placements) for k, arg in kwargs.items()}
    _computed(op, local_args, local_kwargs, mesh, placements)
    return target


def _computed(op: Op, args: list[Any], kwargs: dict[str, Any], mesh: DeviceMesh, placements: Placements) -> Any:
    if not _may_refuse(op, args):
        return op(*args, **kwargs)
    part = next(arg for arg in args if isinstance(arg, torch.Tensor))
    return on_all_parts(op, part, lambda: op(*args, **kwargs), mesh, placements)


def _may_refuse(op: Op, args: list[Any]) -> bool:
    """Whether there are numbers that the op refuses to compute with, which may be in the part of one rank."""
    if op not in _DIVIDING:
        return op is aten.binary_cross_entropy.default
    whole = not any(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in args)
    return whole and (isinstance(args[1], torch.Tensor) or args[1] == 0)


_BETWEEN = ("torchtp.dtensor.", "torch._compile", "torch._dynamo.")


@cache
def rule_of_tagged(op: Op) -> Handler | None:
    """The rule for what PyTorch itself calls elementwise; None for other ops, for `out=`, and for `equal`, which gives no tensor."""
    returns, in_place = [str(result.type) for result in op._schema.returns], op._schema.name.endswith("_")
    if torch.Tag.pointwise not in op.tags or is_composite(op) or op._schema.is_mutable != in_place:
        return None
    return (pointwise_in_place if in_place else pointwise) if returns and set(returns) == {"Tensor"} else None


def _sum_done(leaf: Any) -> Any:
    return sum_done(leaf) if isinstance(leaf, DTensor) else leaf


def _is_cut(arg: DTensor) -> bool:
    return any(placement.is_shard() for placement in spec_of(arg).placements)


def _written_whole(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A plain tensor is what every rank holds: what is written into it is gathered."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, DTensor) and _is_cut(arg):
            notice.gathering(op, arg.shape, arg.dtype)
    op(*map(full_of, args), **{k: full_of(arg) for k, arg in kwargs.items()})
    return args[0]


def common_placements(
    op: Op, tensors: list[torch.Tensor], shape: torch.Size | None = None
) -> tuple[DeviceMesh, Placements]:
    """Mesh and cut that tensors which broadcast to `shape` (the first one's) are best brought to."""
    mesh = next(tensor for tensor in tensors if isinstance(tensor, DTensor)).device_mesh
    return mesh, _common(op, tensors, tensors[0].shape if shape is None else shape, mesh)


def _common(op: Op, tensors: list[torch.Tensor], shape: torch.Size, mesh: DeviceMesh) -> Placements:
    """The cut that needs the least: one axis for a dim, or several as one of the tensors has them where else an axis cuts nothing."""
    common = _one_for_a_dim(tensors, shape, mesh)
    if Replicate() not in common:
        return common
    first = _one_for_a_dim(
        tensors, shape, mesh, minds_rows=False
    )  # others are moved, not the largest: an axis has its dim again
    if first.count(Replicate()) < common.count(Replicate()):
        return first
    for tensor in filter(is_nested, tensors):
        assert isinstance(tensor, DTensor)
        more = len(shape) - tensor.dim()
        nested = tuple(Shard(p.dim + more) if plain_shard(p) else Replicate() for p in spec_of(tensor).placements)
        if all(not plain_shard(p) or tensor.size(p.dim - more) == shape[p.dim] for p in nested):
            return nested
    return common


def _one_for_a_dim(
    tensors: list[torch.Tensor], shape: torch.Size, mesh: DeviceMesh, minds_rows: bool = True
) -> Placements:
    """For each mesh axis the cut of the first tensor that is cut over it; if it `minds_rows`, of one along which the others need no gather."""
    common = []
    taken: set[int] = set()
    for axis in range(mesh.ndim):
        chosen: Any = Replicate()
        choices: list[int] = []
        for tensor in tensors:
            if not isinstance(tensor, DTensor):
                continue
            placement = spec_of(tensor).placements[axis]
            if isinstance(placement, (Replicate, Partial)):
                continue
            dim = placement.dim + len(shape) - tensor.dim()  # type: ignore[attr-defined]
            if not plain_shard(placement):
                if tensor.shape == shape:
                    chosen = placement
                    break
            elif tensor.size(placement.dim) == shape[dim] and dim not in taken and dim not in choices:
                choices.append(dim)
        if choices:
            fit = (dim for dim in choices if not (minds_rows and _some_lack(tensors, axis, dim - len(shape))))
            dim = next(fit, choices[0])
            chosen = Shard(dim)
            taken.add(dim)
        common.append(chosen)
    return tuple(common)


def _some_lack(tensors: list[torch.Tensor], axis: int, dim: int) -> bool:
    """Whether a tensor that is cut over the axis has no rows along `dim` (counted from the end) to be cut instead."""
    return any(
        isinstance(t, DTensor) and spec_of(t).placements[axis].is_shard() and (t.dim() < -dim or t.size(dim) == 1)
        for t in tensors
    )


def aligned(op: Op, arg: Any, shape: torch.Size, mesh: DeviceMesh, placements: Placements) -> Any:
    """The local part of an argument that broadcasts to `shape`, which is cut by `placements`."""
    if not isinstance(arg, torch.Tensor):
        return arg
    if not isinstance(arg, DTensor):
        hand_out(arg)
        if arg.dim() == 0:
            return arg
    wanted: list[Placement] = []
    for placement in placements:
        if plain_shard(placement):
            dim = placement.dim - len(shape) + arg.dim()
            whole = dim < 0 or (arg.size(dim) == 1 and shape[placement.dim] != 1)
            wanted.append(Replicate() if whole else Shard(dim))
        elif isinstance(placement, Replicate) or arg.shape == shape:
            wanted.append(placement)
        else:
            raise NotImplementedError(f"{op}: {tuple(arg.shape)} against {tuple(shape)} cut as {placement}")
    target = tuple(wanted)
    if not isinstance(arg, DTensor):
        return cut_locally(arg, mesh, target)
    spec = spec_of(arg)
    if spec.placements == target:
        return local_of(arg)
    if gathers(spec.placements, target) and not _gives_a_row(arg, spec.placements, target):
        notice.gathering(op, arg.shape, arg.dtype)
    return recut(local_of(arg), spec, target)


def _gives_a_row(arg: DTensor, old: Placements, new: Placements) -> bool:
    """Whether all that is lost of the cut is that of a dim of one row, which an op on all rows needs everywhere."""
    return all(
        a == b or not a.is_shard() or (plain_shard(a) and arg.size(a.dim) == 1) for a, b in zip(old, new, strict=True)
    )


def _is_accumulation(op: Op, tensors: list[torch.Tensor]) -> bool:
    """Whether autograd adds the gradients a plain tensor gets from a rule (plain) and from other ops (DTensors)."""
    if op is not torch.ops.aten.add.Tensor or len(tensors) != 2 or tensors[0].shape != tensors[1].shape:
        return False
    if isinstance(tensors[0], DTensor) == isinstance(tensors[1], DTensor):
        return False
    return _by_autograd_itself() and not _is_of_atan2()


class _Summed(threading.local):
    """The last derivative of atan2 whose sum of squares was taken on this thread: graph task and node."""

    last: tuple[int, int] | None = None


_summed = _Summed()


def _is_of_atan2() -> bool:
    """Whether it is no gradient that is added but a square, in the one derivative that adds what forward has kept.

    That is the first sum in its node: what the engine adds up comes after it.
    """
    node = node_in_backward("Atan2Backward0")
    if node is None or node[:2] == _summed.last:
        return False
    try:
        if isinstance(node[2]._saved_self, DTensor) == isinstance(node[2]._saved_other, DTensor):
            return False
    except RuntimeError:  # what was kept is gone: the derivative is done
        return False
    _summed.last = node[:2]
    return True


def _by_autograd_itself() -> bool:
    """Whether the op now dispatched was called by the engine or a derivative in C++, and not by someone's Python.

    A dispatch mode (a counter of operations) stands between and calls nothing of its own.
    """
    frame: Any = sys._getframe(1)
    others = False
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_name == "__torch_dispatch__":
            others = False
        elif not frame.f_globals["__name__"].startswith(_BETWEEN):
            others = True
        frame = frame.f_back
    return not others


def beside_zero(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shape and dtype of the sum with a zero tensor, which the derivative of abs() makes: asked of the meta device."""
    if any(isinstance(arg, torch.Tensor) and arg.device.type != "meta" for arg in args):
        return passthrough(op, args, kwargs)
    return op(
        *(torch.empty(arg.shape, dtype=arg.dtype, device="meta") if isinstance(arg, DTensor) else arg for arg in args)
    )


def _take_zeros() -> None:
    for name in ("add", "sub", "mul", "div"):
        install(f"prims::{name}", beside_zero)


on_first_mark(_take_zeros)


def _accumulate(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (whole,) = (arg for arg in args if is_plain(arg))
    (cut,) = (arg for arg in args if isinstance(arg, DTensor))
    mesh = cut.device_mesh
    is_zero = not whole.is_meta and not whole.any()
    # One rank alone may have noted its loss in a plain tensor.
    nothing, made = true_on_all([is_zero, axes_of(mesh).writes_into_plain], mesh, whole.device)
    if nothing and (not made or _is_cut(cut)):
        return cut  # autograd's own zeros, where a formula does not depend on an argument, are plain for a DTensor too
    # To a DTensor people's own functions and hooks have given a plain one. Where the sum is for a plain tensor beside it, the
    # hook that hands this one out makes the same of the mean.
    if is_for_subclass(cut):
        return op(contributed(whole, mesh), cut)
    plain = full_of(cut)  # its own mean; no share, for people's own code may look at the sum
    return op(*(plain if arg is cut else arg for arg in args), **kwargs)
