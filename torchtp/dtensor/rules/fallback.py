"""An op without a rule on a cut tensor: gather, compute, cut again, and say so."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, cut_locally, full_of
from torchtp.dtensor.own_images import on_own_images
from torchtp.dtensor.parts import Put, Take, linked
from torchtp.dtensor.registry import COMPOSITE_RULES, bound, install_custom, install_spatial_rules, words
from torchtp.dtensor.rules.pointwise import rule_of_tagged
from torchtp.dtensor.sharing import hand_out
from torchtp.dtensor.spatial import is_marked, is_spatial, on_first_mark
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    StridedShard,
    is_composite,
    is_of_lists,
    is_plain,
    local_of,
    on_plain,
    one_by_one,
    passthrough,
    plain_shard,
    spec_of,
    taken_apart,
)
from torchtp.dtensor.whole import take_plain_gradient
from torchtp.dtensor.wrapping import in_order, wrap

# What upstream does right and without communication when a tensor is cut; everything that is not here, has no rule and
# meets a cut tensor is gathered.
LOCAL_UPSTREAM = words(
    """
    abs acos acosh alias asin asinh atan atanh bitwise_not ceil clone conj cos cosh deg2rad detach detach_
    digamma elu empty_like erf erfc erfinv exp exp2 expm1 floor frac full_like gelu is_pinned is_same_size
    isfinite isinf isnan isneginf isposinf leaky_relu lgamma lift_fresh log log10 log1p log2 logical_not logit
    mish nan_to_num neg ones_like positive rad2deg
    reciprocal record_stream relu round rsqrt sgn sigmoid sign signbit silu sin sinc sinh softplus sqrt square
    tan tanh trunc zeros_like _to_copy permute transpose t unsqueeze
    """
)


_SHORT = 2**18  # bytes; computing as much alike on all ranks takes less time than bringing it together once


def fallback(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `op` on whole tensors and cut the results as the first cut argument was."""
    results = on_own_images(op, args, kwargs)
    if results is not None:
        return results
    leaves = pytree.tree_leaves((args, kwargs))
    cut = next(leaf for leaf in leaves if is_spatial(leaf))
    mesh, placements = spec_of(cut).mesh, spec_of(cut).placements
    for leaf in leaves:
        if is_spatial(leaf):
            notice.gathering(op, leaf.shape, leaf.dtype)
    full_args, full_kwargs = pytree.tree_map(_writable if op._schema.is_mutable else _full, (args, kwargs))
    results = _computed(op, full_args, full_kwargs)
    if torch.is_grad_enabled() and any(map(_is_sparse, pytree.tree_leaves(results))):
        for leaf in filter(is_spatial, leaves):
            take_plain_gradient(leaf)
    if op._schema.is_mutable:
        _write_back(op, args, kwargs, full_args, full_kwargs)
        if _gives_what_it_wrote(op):
            return _written(op, args, kwargs)
    if not op.is_view or cut is not args[0]:
        whole = (Replicate(),) * mesh.ndim
        return pytree.tree_map(
            lambda leaf: _cut_again(leaf, cut, mesh, whole if is_short_list(leaf) else placements), results
        )
    others = args[1:]
    views = _views_of_nothing(op, cut, others, kwargs, results)
    parts = pytree.tree_map(lambda leaf, view: _cut_again(leaf, cut, mesh, placements, view.stride()), results, views)
    several = isinstance(parts, (list, tuple))
    for index, part in enumerate(parts if several else [parts]):
        linked(cut, part, *view_links(op, others, kwargs, index, several))
    return parts


def _views_of_nothing(op: Op, tensor: DTensor, others: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Any:
    """What the op gives of a tensor that lies in memory as `tensor` says; gathered it is dense, also where it is a slice."""
    try:
        nothing = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return op(nothing, *others, **kwargs)
    except RuntimeError:
        return results  # no view: the op was given what one device would refuse


def view_links(op: Op, others: tuple[Any, ...], kwargs: dict[str, Any], index: int, several: bool) -> tuple[Take, Put]:
    """How the result of an op that PyTorch calls a view is taken from the whole, and put back."""

    def view_of(full: torch.Tensor) -> torch.Tensor:
        views = _computed(op, (full, *others), kwargs)
        return views[index] if several else views

    def take(whole: DTensor) -> DTensor:
        spec = spec_of(whole)
        return _cut_again(view_of(full_of(whole)), whole, spec.mesh, spec.placements)

    def put(part: DTensor, whole: DTensor) -> None:
        spec, full = spec_of(whole), full_of(whole)
        full = full.clone() if full is local_of(whole) else full
        view_of(full).copy_(full_of(part))
        local_of(whole).copy_(cut_locally(full, spec.mesh, spec.placements))

    return take, put


# Upstream does not ask the sum whether it is close, and marks what gather picked by a mask, of which it takes but one axis.
_NOT_OF_SUMS = {torch.ops.aten.allclose.default, torch.ops.aten.gather.default}
_OF_BITS = torch.ops.aten.view.dtype  # no view of a sum is the sum of such views
_VIEWS = {getattr(torch.ops.aten, name).default for name in ("view", "_unsafe_view", "_reshape_alias")}


def _computed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the op gives of plain tensors: a DTensor's stride may promise a view that they can't give."""
    return args[0].reshape(args[1]) if op in _VIEWS else on_plain(op, args, kwargs)


def has_strided_shard(leaf: Any) -> bool:
    """Whether a DTensor is cut otherwise than torch.chunk does it; rules leave such to the fallback."""
    return isinstance(leaf, DTensor) and any(isinstance(p, StridedShard) for p in spec_of(leaf).placements)


def _full(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        return in_order(full_of(leaf), leaf.stride())  # by it some kernels choose the order of what they write
    if isinstance(leaf, torch.Tensor):
        hand_out(leaf)
    return leaf


def _writable(leaf: Any) -> Any:
    """Of what is not contiguous some kernels write into a copy."""
    return _full(leaf).contiguous() if isinstance(leaf, DTensor) else _full(leaf)


def is_short_list(leaf: Any) -> bool:
    """Rows of numbers (boxes, scores, points) that would be gathered anew by each op that follows; no image is made of such."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() <= 2 and leaf.numel() * leaf.element_size() <= _SHORT


def _is_sparse(leaf: Any) -> bool:
    """Whether it stays plain, and whole on every rank."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided


def _cut_again(leaf: Any, like: DTensor, mesh: DeviceMesh, placements: Placements, stride: Any = None) -> Any:
    if not isinstance(leaf, torch.Tensor) or _is_sparse(leaf):
        return leaf
    kept = tuple(
        placement
        if leaf.dim() == like.dim() and plain_shard(placement) and leaf.size(placement.dim) > 1
        else Replicate()
        for placement in placements
    )
    return wrap(cut_locally(leaf, mesh, kept).clone(), mesh, kept, leaf.shape, stride)


def _write_back(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], full_args: tuple[Any, ...], full_kwargs: dict[str, Any]
) -> None:
    """Copy what the op wrote on whole tensors into the cut ones."""
    before, after = bound(op, args, kwargs), bound(op, full_args, full_kwargs)
    for argument, old, new in zip(op._schema.arguments, before, after, strict=True):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if isinstance(old, (list, tuple)):  # of _fused_adam_
            for one, other in zip(old, new, strict=True):
                _write_back_one(op, one, other)
        else:
            _write_back_one(op, old, new)


def _write_back_one(op: Op, old: Any, new: Any) -> None:
    if not isinstance(old, DTensor):
        return
    if new.shape != old.shape:
        raise NotImplementedError(
            f"{op} gives a cut tensor of {tuple(old.shape)} another shape, {tuple(new.shape)}, in place: "
            "make another tensor (view, narrow, new_empty)"
        )
    spec = spec_of(old)
    local_of(old).copy_(cut_locally(new, spec.mesh, spec.placements))


def _written(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call writes into, whatever kind of tensor that is: the first argument, or `out`."""
    arguments = zip(op._schema.arguments, bound(op, args, kwargs), strict=True)
    return next(
        given for argument, given in arguments if argument.alias_info is not None and argument.alias_info.is_write
    )


def _gives_what_it_wrote(op: Op) -> bool:
    """Whether the op returns the one tensor it writes into; rrelu_with_noise writes its noise and returns another."""
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def unruled(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of all ops without a rule."""
    elementwise = rule_of_tagged(op)
    if elementwise is not None:
        return elementwise(op, args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    if any(is_spatial(leaf) for leaf in leaves):
        if is_composite(op):
            return COMPOSITE_RULES.get(op.name().removeprefix("aten::"), taken_apart)(op, args, kwargs)
        return one_by_one(op, args, kwargs) if is_of_lists(op) else fallback(op, args, kwargs)
    cut = next(leaf for leaf in leaves if isinstance(leaf, DTensor))
    if not is_marked(cut.device_mesh):
        return passthrough(op, args, kwargs)
    whole = all(
        isinstance(p, Replicate) for leaf in leaves if isinstance(leaf, DTensor) for p in spec_of(leaf).placements
    )
    if op._schema.is_mutable:
        mixed = any(is_plain(leaf) and leaf.dim() for leaf in leaves)
        gives_others = all(returned.alias_info is None for returned in op._schema.returns)
        takes = whole and (gives_others or _gives_what_it_wrote(op))
        if not (takes and mixed):
            try:
                return passthrough(op, args, kwargs)
            except NotImplementedError:  # upstream does not know the op
                if not takes:
                    raise
        if gives_others:  # the statistics of an observer are written, and what it quantized is returned
            return _on_replicas(op, args, kwargs, cut.device_mesh)
        local_args, local_kwargs = pytree.tree_map(_local_of_whole, (args, kwargs))
        on_plain(op, local_args, local_kwargs)  # every rank writes into what all of them hold
        return _written(op, args, kwargs)
    if whole and is_composite(op):  # `contiguous` of a view: the local tensor may be a dense copy already
        return taken_apart(op, args, kwargs)
    if whole:
        return _on_replicas(op, args, kwargs, cut.device_mesh)
    if op.is_view and op is not _OF_BITS and args[0] is cut and _is_whole_or_summands(cut):
        return _on_replicas(op, args, kwargs, cut.device_mesh, spec_of(cut).placements)
    args, kwargs = pytree.tree_map(lambda leaf: _replicated(leaf, cut.device_mesh), (args, kwargs))
    if op not in _NOT_OF_SUMS and torch.Tag.dynamic_output_shape not in op.tags:  # what data pick has no shape it knows
        with contextlib.suppress(NotImplementedError):  # upstream does not know the op
            results = passthrough(op, args, kwargs)
            if not any(map(_is_masked, pytree.tree_leaves(results))):
                return results
    args, kwargs = pytree.tree_map(_summed, (args, kwargs))
    return _on_replicas(op, args, kwargs, cut.device_mesh)


def _is_whole_or_summands(tensor: DTensor) -> bool:
    """Whether a view of the sum is the sum of the views, so that what is written into it reaches the tensor."""
    return all(isinstance(p, Replicate) or is_of_summands(p) for p in spec_of(tensor).placements)


def is_of_summands(placement: Placement) -> bool:
    """Whether ranks hold what adds up to the whole, or has it as its mean: what is linear may be done to each."""
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg")


def _is_masked(leaf: Any) -> bool:
    """Whether rows that other ranks have picked are missing; upstream can't sum such any more once their shape changes."""
    return isinstance(leaf, DTensor) and any(
        isinstance(p, Partial) and type(p) is not Partial for p in spec_of(leaf).placements
    )


def _summed(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    whole = full_of(leaf)
    return wrap(whole, leaf.device_mesh, (Replicate(),) * leaf.device_mesh.ndim, leaf.shape)


def _on_replicas(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, placements: Placements | None = None
) -> Any:
    """What every rank holds whole, or a summand of, every rank computes so."""
    local_args, local_kwargs = pytree.tree_map(_local_of_whole, (args, kwargs))
    results = _computed(op, local_args, local_kwargs)
    placed = (Replicate(),) * mesh.ndim if placements is None else placements

    def give(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return wrap(leaf, mesh, placed, leaf.shape, leaf.stride() if op.is_view else None)

    return pytree.tree_map(give, results)


def _local_of_whole(leaf: Any) -> Any:
    return local_of(leaf) if isinstance(leaf, DTensor) else _full(leaf)


def _replicated(leaf: Any, mesh: DeviceMesh) -> Any:
    """A plain tensor on a mesh that cuts images is what all its ranks hold."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
        return leaf
    hand_out(leaf)
    if leaf.dim() == 0:
        return leaf
    return wrap(leaf, mesh, (Replicate(),) * mesh.ndim, leaf.shape)


def _on_spatial_mesh(leaf: Any) -> bool:
    return isinstance(leaf, DTensor) and is_marked(leaf.device_mesh)


def take_custom_ops() -> None:
    """Have ops that other libraries have registered by now gather cut tensors with notice."""
    install_custom(unruled)


on_first_mark(lambda: install_spatial_rules(unruled, LOCAL_UPSTREAM, _on_spatial_mesh))
