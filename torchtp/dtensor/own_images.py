"""Ops that act on each image, or each channel of it, by itself: local where only these are cut, as after a network has made windows of its image."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor.cut import sums_done
from torchtp.dtensor.nesting import Handler, is_nested, takes_nested_if
from torchtp.dtensor.registry import bound
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Partial, Replicate, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap

_OF_IMAGES = re.compile(
    r"aten::((_?adaptive_(avg|max)_pool|avg_pool|max_pool|max_unpool|_?upsample_[a-z_]+|(reflection|replication)_pad|grid_sampler_)"
    r"(?P<dims>[123])d(_aa|_with_indices)?(_backward)?|im2col|col2im)"
)

_MIXES_CHANNELS = ("aten::grid_sampler", "aten::im2col", "aten::col2im")
_NUM_DIMS = {"aten::im2col": 4, "aten::col2im": 3}


def on_own_images(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """What the op gives, each rank for its own images; None where it is no such op or something else is cut."""
    found = _OF_IMAGES.fullmatch(op._schema.name)
    if found is None:
        return None
    num_dims = int(found["dims"]) + 2 if found["dims"] else _NUM_DIMS[op._schema.name]
    values = bound(op, args, kwargs)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if all(tensor.dim() == num_dims - 1 for tensor in tensors):
        return _of_one_image(op, values)
    lead = _lead(op, tensors)
    if lead is None or any(t.dim() != num_dims for t in tensors):
        return None
    cut = _cut_dims(lead)
    mesh = lead.device_mesh
    placements = sums_done(spec_of(lead).placements)
    parts = [local_as(value, mesh, placements) if isinstance(value, torch.Tensor) else value for value in values]
    own = next(part.shape[:2] for part in parts if isinstance(part, torch.Tensor))
    if 0 in own:  # which some kernels refuse
        parts = [
            part.new_zeros([max(1, size) for size in part.shape]) if isinstance(part, torch.Tensor) else part
            for part in parts
        ]
    names = [argument.name for argument in op._schema.arguments]
    if "input_size" in names:
        place = names.index("input_size")
        parts[place] = [*(max(1, size) for size in own), *parts[place][2:]]

    def give(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        mine = result[tuple(slice(own[dim]) if dim in cut or own[dim] == 0 else slice(None) for dim in (0, 1))]
        shape = torch.Size([lead.size(dim) if dim in cut else size for dim, size in enumerate(mine.shape)])
        return wrap(mine, mesh, placements, shape)

    return pytree.tree_map(give, op(*parts))


def takes_images_cut_twice(handler: Handler) -> Handler:
    """Mark a rule for such an op: where several axes cut the images, one inside the other, and nothing else, each rank has its own."""

    def images_alone(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
        tensors = [value for value in bound(op, args, kwargs) if isinstance(value, torch.Tensor)]
        alike = len({tensor.dim() for tensor in tensors}) == 1
        return dims == {0} and alike and tensors[0].dim() >= 4 and _lead(op, tensors) is not None

    @functools.wraps(handler)
    def either(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = on_own_images(op, args, kwargs) if any(map(is_nested, args)) else None
        return handler(op, args, kwargs) if results is None else results

    return takes_nested_if(images_alone)(either)


def _lead(op: Op, tensors: Sequence[torch.Tensor]) -> DTensor | None:
    """The tensor that says how all are cut, if it is in nothing but what the op leaves apart."""
    apart = {0} if op._schema.name.startswith(_MIXES_CHANNELS) else {0, 1}
    lead = next((t for t in tensors if isinstance(t, DTensor) and is_spatial(t) and _cut_dims(t) <= apart), None)
    if lead is None or any(t.size(dim) != lead.size(dim) for t in tensors for dim in _cut_dims(lead)):
        return None
    return lead


def _of_one_image(op: Op, values: tuple[Any, ...]) -> Any:
    """Without a dim for the images: given one."""
    aten = torch.ops.aten
    results = op(*(aten.unsqueeze(value, 0) if isinstance(value, torch.Tensor) else value for value in values))
    return pytree.tree_map(lambda result: aten.squeeze.dim(result, 0), results)


def _cut_dims(tensor: DTensor) -> set[int]:
    """-1 for a cut that is not torch.chunk's."""
    placements = spec_of(tensor).placements
    return {p.dim if plain_shard(p) else -1 for p in placements if not isinstance(p, (Replicate, Partial))}
