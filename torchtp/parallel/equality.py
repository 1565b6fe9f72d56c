"""Parameters and buffers that all ranks have alike: from the beginning, and again where a forward wrote into them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from torchtp.gradients import broadcast_parameters
from torchtp.layout import Layout
from torchtp.parallel.agreement import is_alone
from torchtp.parallel.digest import digest


class Written:
    """What forwards wrote into parameters and buffers from the images of their data rank, until it is alike again.

    Such as initial values by the first images (ActNorm), or a codebook that follows what it codes. Statistics that norms
    keep don't belong to it: in training nothing reads them.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._names: set[str] = set()

    @contextlib.contextmanager
    def watched(self, module: nn.Module, addresses: Collection[int]) -> Iterator[None]:
        """Around a forward, which may raise after it has written: what is at `addresses` by then, and parameters that it
        wrote plain, those of convolutions and norms."""
        before = [(one, one._version) for one in module.parameters() if _counts(one)] if self._is_asked() else []
        try:
            yield
        finally:
            plain = {one.untyped_storage().data_ptr() for one, version in before if one._version != version}
            self.note(module, plain.union(addresses))

    def _is_asked(self) -> bool:
        """Whether there are data ranks that write something else."""
        return self._layout.group.size() > self._layout.num_shards

    def note(self, module: nn.Module, addresses: Collection[int]) -> None:
        """Take in what was written, by the address of its memory."""
        if addresses and self._is_asked():
            self._names.update(
                name for name, tensor in tensors_of(module) if tensor.untyped_storage().data_ptr() in addresses
            )

    def digest(self, module: nn.Module, newcomers: Collection[str] = ()) -> int:
        """What ranks that wrote the same, or have the same newcomers, have alike; 0 where there is nothing of both."""
        self._names.update(newcomers)
        if not self._names:
            return 0
        return digest(repr([_fact(*one) for one in tensors_of(module) if one[0] in self._names]).encode())

    def settle(self, module: nn.Module, digests: Sequence[int]) -> None:
        """Overwrite what was written by what the first rank of the group has. Collective where one of `digests`, of all ranks, is not 0."""
        if not any(digests):
            return
        named = list(tensors_of(module))
        names, self._names = self._names, set()
        if any(one != digests[0] for one in digests):
            named, names = _alike(named, names, self._layout)
        _overwrite([one for one in named if one[0] in names], self._layout)


def make_equal(
    module: nn.Module,
    layout: Layout,
    known: Container[torch.Tensor] | None = None,
    complaint: str = "",
    options: str = "",
) -> None:
    """Broadcast parameters and buffers, but those that are `known`, from the first rank of `layout.group`.

    Raises ValueError on all ranks if names, shapes, dtypes or `options` differ or a tensor is off the mesh's devices;
    without `known` also if layers of torch.nn do, or their options.
    Buffers may differ where some are `known`: forwards have made them since, tables for the sizes of a rank's images.
    """
    named = [(name, tensor) for name, tensor in tensors_of(module) if known is None or tensor not in known]
    for name, tensor in named:
        if is_lazy(tensor):
            complaint, named = f"{name} has no shape yet: call the module once before torchtp.parallelize", []
            break
    complaint = complaint or next(
        (
            f"{name} lives on {tensor.device}, but the mesh is one of {layout.mesh.device_type} devices: move the "
            f"module with .{'to_empty(device=' if tensor.is_meta else 'to('}{str(layout.device)!r}) first"
            for name, tensor in named
            if tensor.device.type != layout.mesh.device_type
        ),
        "",
    )
    compared = named if known is None else [one for one in named if isinstance(one[1], nn.Parameter)]
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in compared]
    layout.agreement.check_modules([(repr(layout) + options, torch.Size(), None), *described], complaint)
    if known is None:  # asked last: a parameter that is missing says more
        layout.agreement.check_modules([(layer, torch.Size(), None) for layer in _layers(module)])
    _overwrite(named if known is None else _alike(named, set(), layout)[0], layout)


def _layers(module: nn.Module) -> Iterator[str]:
    """What torch.nn's own layers are, and their options: with others on some ranks an image would be a patchwork."""
    for name, part in module.named_modules():
        if type(part).__module__.startswith("torch.nn.modules."):
            options = re.sub(r" at 0x[0-9a-f]+", "", part.extra_repr())  # of functions: others in each process
            yield f"{type(part).__name__}({options}) as {name!r}"


def _counts(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor counts what is written into it."""
    return not isinstance(tensor, DTensor) and not tensor.is_inference()


def _alike(
    named: list[tuple[str, torch.Tensor]], names: set[str], layout: Layout
) -> tuple[list[tuple[str, torch.Tensor]], set[str]]:
    """The tensors that all ranks have in one shape and dtype, and the names that any rank gives. Collective."""
    if is_alone(layout.group):
        return named, names
    facts = [_fact(*one) for one in named]
    told: list[tuple[list[str], list[str]]] = [([], [])] * layout.group.size()
    dist.all_gather_object(told, (facts, sorted(names)), group=layout.group)
    common = set(facts).intersection(*(theirs for theirs, _ in told))
    alike = [one for one, fact in zip(named, facts, strict=True) if fact in common]
    # By name: forwards may have made them in another order.
    return sorted(alike, key=lambda one: one[0]), {name for _, theirs in told for name in theirs}


def _fact(name: str, tensor: torch.Tensor) -> str:
    return repr((name, tuple(tensor.shape), str(tensor.dtype)))


def _overwrite(named: Sequence[tuple[str, torch.Tensor]], layout: Layout) -> None:
    if named and not is_alone(layout.group):
        # Past autograd's versions: a backward of who has read them may still be to come, a forward or a hook before one.
        broadcast_parameters([(name, tensor.data) for name, tensor in named], layout.group)


def weakly(tensors: Iterable[torch.Tensor]) -> WeakTensorKeyDictionary:
    """The tensors as keys, as long as they live."""
    kept = WeakTensorKeyDictionary()
    for tensor in tensors:
        kept[tensor] = None
    return kept


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain parameters and buffers by name."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(tensor, DTensor):  # FSDP's own: cut already, and equal by then
            yield name, tensor
