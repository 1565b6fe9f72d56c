"""What one rank finds all ranks hear of and go by: numbers of its part that an op refuses, what it alone has kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, axes_cutting
from torchtp.dtensor.moving import all_reduced
from torchtp.dtensor.upstream import DeviceMesh, Op

_KINDS: tuple[type[RuntimeError | IndexError], ...] = (RuntimeError, IndexError)


def on_all_parts(
    op: Op, part: torch.Tensor, compute: Callable[[], Any], mesh: DeviceMesh, placements: Placements
) -> Any:
    """What `compute` gives, which asks the op about this rank's part of what is placed so.

    RuntimeError or IndexError on all ranks, where it refuses the part of one. Not on CUDA, whose kernels refuse a number
    later, or never.
    """
    axes = axes_cutting(placements)
    if not axes or part.device.type != "cpu":
        return compute()
    result, refused = None, None
    try:
        result = compute()
    except _KINDS as error:
        refused = error
    kinds = torch.tensor([float(isinstance(refused, kind)) for kind in _KINDS])
    found = all_reduced(kinds, mesh, axes, "max").tolist()
    if refused is not None:
        raise refused
    for kind, anywhere in zip(_KINDS, found, strict=True):
        if anywhere:
            raise kind(f"{op}: another rank refuses the numbers of its part of the whole: its own error says which")
    return result


def check_fractions(op: Op, tensor: torch.Tensor) -> None:
    """RuntimeError for a tensor of whole numbers, of which PyTorch has no mean, no norm and no softmax."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise RuntimeError(f"{op}: a floating point or complex tensor is needed, but it is of {tensor.dtype}")


def true_on_all(found: Sequence[bool], mesh: DeviceMesh, device: torch.device) -> list[bool]:
    """Which of these are so on every rank of the mesh; without data there are no others to ask."""
    if device.type == "meta":
        return list(found)
    told = torch.tensor(found, dtype=torch.float32, device=device)
    return [bool(each) for each in all_reduced(told, mesh, list(range(mesh.ndim)), "min").tolist()]
