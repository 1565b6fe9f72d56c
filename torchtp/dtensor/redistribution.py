"""DTensor's own redistribution as rules do it: of a tensor of which several axes cut one dim axis by axis, of a rare dtype as bytes.

Upstream takes the axes at once, as if their chunks were those of one group of all (see `upstream.redistributed`), so that
`full_tensor()` and `redistribute()` would give other rows where the chunks differ in length.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import _api, _dispatch, _redistribute

from torchtp.dtensor.spatial import is_marked, on_first_mark
from torchtp.dtensor.upstream import DTensorSpec, nested_dims, redistributed, travels_as_bytes


def _install() -> None:
    theirs = _redistribute.redistribute_local_tensor

    @functools.wraps(theirs)
    def redistribute_local_tensor(
        local: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        nested = nested_dims(current_spec.placements) or nested_dims(target_spec.placements)
        if (nested or travels_as_bytes(local.dtype)) and is_marked(current_spec.mesh):
            return redistributed(local, current_spec, target_spec.placements)
        return theirs(local, current_spec, target_spec, *args, **kwargs)

    for module in (_redistribute, _api, _dispatch):
        module.redistribute_local_tensor = redistribute_local_tensor  # type: ignore[attr-defined]


on_first_mark(_install)
