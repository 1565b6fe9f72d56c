"""`tensor.data = values`: a DTensor takes over part and placements of the values, as a plain tensor does their memory."""

from __future__ import annotations

import torch

from torchtp.dtensor.cut import plain_cuts
from torchtp.dtensor.spatial import is_marked, on_first_mark
from torchtp.dtensor.upstream import DTensor, take_over
from torchtp.dtensor.whole import Cut


def _cut_as(tensor: DTensor, values: torch.Tensor) -> DTensor:
    """What every rank holds."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        cut: DTensor = Cut.apply(values, tensor.device_mesh, plain_cuts(tensor.placements))
    return cut


def _install() -> None:
    data = torch.Tensor.data

    def put(self: DTensor, values: torch.Tensor) -> None:
        if is_marked(self.device_mesh):
            values = values if isinstance(values, DTensor) else _cut_as(self, values)
            take_over(self, values)
        data.__set__(self, values)  # type: ignore[attr-defined]

    DTensor.data = property(data.__get__, put)  # type: ignore[assignment, attr-defined]


on_first_mark(_install)
