"""Parameters and buffers that all ranks have alike: from the beginning, and again where a forward wrote into them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torchtp.gradients import broadcast_parameters
from torchtp.layout import Layout
from torchtp.parallel.digest import digest


class Written:
    """What forwards wrote into parameters and buffers from the images of their data rank, until it is alike again.

    Such as initial values by the first images (ActNorm), or a codebook that follows what it codes. Statistics that norms
    keep don't belong to it: in training nothing reads them.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._names: set[str] = set()

    def note(self, module: nn.Module, addresses: Collection[int]) -> None:
        """Take in what was written, by the address of its memory."""
        if addresses and self._layout.group.size() > self._layout.num_shards:
            self._names.update(
                name for name, tensor in tensors_of(module) if tensor.untyped_storage().data_ptr() in addresses
            )

    def digest(self) -> int:
        """What ranks that wrote the same have alike; 0 where nothing was written."""
        return digest(repr(sorted(self._names)).encode()) if self._names else 0

    def settle(self, module: nn.Module, digests: Sequence[int]) -> None:
        """Overwrite what was written by what the first rank of the group has. Collective where one of `digests`, of all ranks, is not 0."""
        if not any(digests):
            return
        alike = all(one == digests[0] for one in digests)
        # Past autograd's versions: a backward of the forward that wrote may still be to come.
        named = [(name, tensor.data) for name, tensor in tensors_of(module) if not alike or name in self._names]
        self._names.clear()
        _overwrite(named, self._layout)


def make_equal(
    module: nn.Module, layout: Layout, known: Collection[int] = (), complaint: str = "", options: str = ""
) -> None:
    """Broadcast parameters and buffers, but those of `known` ids, from the first rank of `layout.group`.

    Raises ValueError on all ranks if names, shapes, dtypes or `options` differ or a tensor is off the mesh's devices.
    """
    named = [(name, tensor) for name, tensor in tensors_of(module) if id(tensor) not in known]
    for name, tensor in named:
        if is_lazy(tensor):
            complaint, named = f"{name} has no shape yet: call the module once before torchtp.parallelize", []
            break
    complaint = complaint or next(
        (
            f"{name} lives on {tensor.device}, but the mesh is one of {layout.mesh.device_type} devices: move the "
            f"module with .to({str(layout.device)!r}) first"
            for name, tensor in named
            if tensor.device.type != layout.mesh.device_type
        ),
        "",
    )
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in named]
    layout.agreement.check_modules([(repr(layout) + options, torch.Size(), None), *described], complaint)
    _overwrite(named, layout)


def _overwrite(named: Sequence[tuple[str, torch.Tensor]], layout: Layout) -> None:
    if named and layout.group.size() > 1 and dist.get_backend(layout.group) != "fake":
        broadcast_parameters(named, layout.group)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain parameters and buffers by name."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(tensor, DTensor):  # FSDP's own: cut already, and equal by then
            yield name, tensor
