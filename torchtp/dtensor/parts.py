"""Parts of cut tensors that PyTorch calls views and that are copies here: a write into one reaches all the others.

The rows of a slice along a cut dim belong to other chunks than the rows they came from, so they have moved. What is
written into the part is moved back, and what is written into the whole is taken again. Both are collective: every rank
does them, also where nobody holds the other tensor any more, for that is nothing the ranks could agree on without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchtp.dtensor.agreed import true_on_all
from torchtp.dtensor.upstream import DeviceMesh, DTensor, DTensorSpec, local_of, make_dtensor, spec_of

Take = Callable[[DTensor], DTensor]  # whole -> part
Put = Callable[[DTensor, DTensor], None]  # (part, whole): writes the part's elements into the whole

_ATTRIBUTE = "_torchtp_memory"
_KEPT = "_torchtp_whole"
_FORGET_FROM = 64  # parts of one memory from which on those that are gone on all ranks are forgotten


@dataclass(eq=False)
class _Memory:
    """The memory of a local tensor, and how its elements hang together with those of others. Kept on the storage itself."""

    storage: StorageWeakRef
    whole: _Link | None = None  # what this memory is a part of
    parts: list[_Link] = field(default_factory=list)  # the same ones on all ranks
    forget_from: int = _FORGET_FROM
    num_writes: int = 0


@dataclass(eq=False)
class _Place:
    """Where a DTensor lies in a memory, without keeping it alive."""

    memory: _Memory
    spec: DTensorSpec
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> DTensor:
        """The tensor that lies there; another one of its shape when the memory is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.storage.cdata)
        local = torch.empty(0, dtype=self.dtype, device=self.device)
        if storage is None:
            local = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        else:
            local.set_(storage, self.offset, self.size, self.stride)
        return make_dtensor(local, self.spec)


@dataclass(eq=False)
class _Link:
    whole: _Place
    part: _Place
    take: Take
    put: Put


def linked(whole: DTensor, part: DTensor, take: Take, put: Put) -> DTensor:
    """Returns `part`, a copy of elements of `whole`; from now on writes into either reach the other.

    `take` gives the part of a whole anew, `put` writes a part's elements into a whole. Neither may keep a tensor.
    """
    from_place, to_place = _place(whole), _place(part)
    link = _Link(from_place, to_place, take, put)
    if len(from_place.memory.parts) >= from_place.memory.forget_from:
        _forget(from_place.memory, from_place.spec.mesh, from_place.device)
    from_place.memory.parts.append(link)
    to_place.memory.whole = link
    # As a view keeps what it is a view of; in inference mode nothing else does, and the next whole is reached through it.
    setattr(local_of(part).untyped_storage(), _KEPT, local_of(whole).untyped_storage())
    return part


def _forget(memory: _Memory, mesh: DeviceMesh, device: torch.device) -> None:
    """Forget parts that are gone on all ranks; one that a rank has kept the others take along with it.

    Seldom, if most are kept: the ranks ask each other.
    """
    gone = true_on_all([each.part.memory.storage.expired() for each in memory.parts], mesh, device)
    memory.parts[:] = [each for each, is_gone in zip(memory.parts, gone, strict=True) if not is_gone]
    memory.forget_from = max(_FORGET_FROM, 2 * len(memory.parts))


def linked_by_way(
    whole: DTensor,
    part: DTensor,
    view_of: Take,
    moved: Take,
    put_back: Callable[[DTensor, DTensor], None],
) -> DTensor:
    """The same of what `view_of` gives of a whole that was `moved` for it, a copy that `put_back` writes into the whole."""

    def put(part: DTensor, whole: DTensor) -> None:
        there = moved(whole)
        torch.ops.aten.copy_.default(view_of(there), part)
        put_back(there, whole)

    return linked(whole, part, lambda whole: view_of(moved(whole)), put)


def is_linked(part: DTensor) -> bool:
    """Whether the tensor lies in memory that is known as a copy of elements of another one."""
    memory = getattr(local_of(part).untyped_storage(), _ATTRIBUTE, None)
    return memory is not None and memory.whole is not None


def written(target: DTensor) -> None:
    """Tell the tensors that share elements with `target`, into which an op has written."""
    memory = getattr(local_of(target).untyped_storage(), _ATTRIBUTE, None)
    if memory is not None:
        _spread(memory, None)


class Watch:
    """Sees whether anything is written into a tensor, or into what shares elements with it."""

    def __init__(self, tensor: DTensor):
        self._tensor, self._memory = tensor, _place(tensor).memory
        self._before = self._memory.num_writes

    def was_written(self) -> bool:
        memory = getattr(local_of(self._tensor).untyped_storage(), _ATTRIBUTE, None)
        return memory is not self._memory or memory.num_writes != self._before


def _spread(memory: _Memory, source: _Link | None) -> None:
    memory.num_writes += 1
    link = memory.whole
    if link is not None and link is not source:
        link.put(link.part.tensor(), link.whole.tensor())
        _spread(link.whole.memory, link)
    for link in memory.parts:
        if link is not source:
            local_of(link.part.tensor()).copy_(local_of(link.take(link.whole.tensor())))
            _spread(link.part.memory, link)


def _place(tensor: DTensor) -> _Place:
    local = local_of(tensor)
    storage = local.untyped_storage()
    memory = getattr(storage, _ATTRIBUTE, None)
    if memory is None:
        memory = _Memory(StorageWeakRef(storage))
        setattr(storage, _ATTRIBUTE, memory)
    offset = int(local.storage_offset())
    return _Place(memory, spec_of(tensor), local.dtype, local.device, local.shape, local.stride(), offset)
