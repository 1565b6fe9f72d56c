"""What a training step costs: memory kept for backward, bytes moved between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtp import _C


class SavedBytes:
    """Context manager that counts the memory autograd keeps for backward in the forward run inside it.

    `num_bytes` is the size of the distinct storages of saved tensors (a DTensor counts with its local part), without
    the storages of `exclude` (the parameters).
    """

    def __init__(self, exclude: Iterable[Tensor] = ()):
        self._excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
        self._storages: dict[int, int] = {}
        # Holds every storage seen, so that no address is used twice while counting.
        self._kept: list[torch.UntypedStorage] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        return sum(self._storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        address = storage._cdata
        if address not in self._excluded and address not in self._storages:
            self._storages[address] = storage.nbytes()
            self._kept.append(storage)
        return tensor

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._kept.clear()


def exchanged_bytes(group_names: Iterable[str]) -> int:
    """Bytes of halos that this rank has sent so far over the named process groups."""
    return sum(_C.traffic(name)["num_bytes"] for name in group_names)
