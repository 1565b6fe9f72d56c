"""Ops that act on each image by itself: local where only the images are cut, after a network has made windows of its image say."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor.cut import wrap
from torchtp.dtensor.registry import bound
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Partial, Replicate, plain_shard, spec_of

_OF_IMAGES = re.compile(
    r"aten::((_?adaptive_(avg|max)_pool|avg_pool|max_pool|max_unpool|_?upsample_[a-z_]+|(reflection|replication)_pad|grid_sampler_)"
    r"(?P<dims>[123])d(_aa|_with_indices)?(_backward)?|im2col|col2im)"
)

_NUM_DIMS = {"aten::im2col": 4, "aten::col2im": 3}


def on_own_images(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """What the op gives, each rank for its own images; None where it is no such op or something else is cut."""
    found = _OF_IMAGES.fullmatch(op._schema.name)
    if found is None:
        return None
    num_dims = int(found["dims"]) + 2 if found["dims"] else _NUM_DIMS[op._schema.name]
    values = bound(op, args, kwargs)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    lead = next((t for t in tensors if isinstance(t, DTensor) and is_spatial(t) and _only_images_are_cut(t)), None)
    if lead is None or any(t.dim() != num_dims or t.size(0) != lead.size(0) for t in tensors):
        return None
    mesh = lead.device_mesh
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec_of(lead).placements)
    parts = [local_as(value, mesh, placements) if isinstance(value, torch.Tensor) else value for value in values]
    own = next(part.size(0) for part in parts if isinstance(part, torch.Tensor))
    if own == 0:  # which some kernels refuse
        parts = [part.new_zeros([1, *part.shape[1:]]) if isinstance(part, torch.Tensor) else part for part in parts]
    names = [argument.name for argument in op._schema.arguments]
    if "input_size" in names:
        place = names.index("input_size")
        parts[place] = [max(1, own), *parts[place][1:]]

    def give(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        return wrap(result[:own], mesh, placements, torch.Size([lead.size(0), *result.shape[1:]]))

    return pytree.tree_map(give, op(*parts))


def _only_images_are_cut(tensor: DTensor) -> bool:
    placements = spec_of(tensor).placements
    return all(isinstance(p, (Replicate, Partial)) or (plain_shard(p) and p.dim == 0) for p in placements)
