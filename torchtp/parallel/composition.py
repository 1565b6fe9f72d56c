"""What a parallelized module is made of at each forward, and parameters of it that are computed."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless
from torch.utils.weak import WeakTensorKeyDictionary

from torchtp.dtensor.whole import Given
from torchtp.layout import Layout
from torchtp.parallel.captured_gradients import are_shared
from torchtp.parallel.structure import Structure


class Composition:
    """What a module is made of, at the last look: its parameters, and which of them are computed."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._structure: Structure | None = None
        self._places: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self._own = WeakTensorKeyDictionary()  # parameters that have been the module's outside of `functional_call`
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those of which all tensors were broadcast
        self._untrained: dict[str, nn.Parameter] = {}  # frozen ones that came later, by name
        self._told: list[weakref.ref[nn.Parameter]] = []  # those of them that `newcomers` has given
        self.parameters: frozenset[int] = frozenset()  # their ids

    @property
    def is_computed(self) -> bool:
        """Whether tensors stand in for parameters, as under `torch.func.functional_call`."""
        return bool(self._places)

    def look(self, module: nn.Module) -> bool:
        """Whether a module or parameter was replaced, added or taken away since the last look, or such a one thawed."""
        is_thawed = any(parameter.requires_grad for parameter in self._untrained.values())
        if self._structure is not None and self._structure.still_holds() and not is_thawed:
            return False
        self._structure = Structure(module)
        stands_in = self._stands_in if _is_functional() else _is_computed
        self._places = [
            (part._parameters, name)
            for part in module.modules()
            if not isinstance(part, torch.jit.ScriptModule)
            for name, value in part._parameters.items()
            if value is not None and stands_in(value)
        ]
        self.parameters = frozenset(map(id, module.parameters()))
        self.share(module)
        return True

    def share(self, module: nn.Module) -> None:
        """Have gradients complete that are taken of the module's parameters from now on."""
        if not _is_functional():
            for one in module.parameters():
                self._own[one] = None
        if self._layout.num_shards > 1:
            plain = [one for one in module.parameters() if one.is_leaf and not isinstance(one, DTensor)]
            are_shared(plain, self._layout.spatial_group.group_name)

    def _stands_in(self, value: torch.Tensor) -> bool:
        return _is_computed(value) or (not isinstance(value, DTensor) and value not in self._own)

    def taken_up(self, module: nn.Module) -> None:
        """Say that all ranks have the same tensors in all parts there are now."""
        self._parts = weakref.WeakSet(module.modules())

    def stranger(self, module: nn.Module, known: Iterable[torch.Tensor], *, takes_up: bool) -> str:
        """A sentence on a trained parameter that is none of `known`, or is one and gone; empty where there is none.

        What is new and not trained is said by `newcomers`, to be asked at a forward that `takes_up` what is new.
        """
        ids = {*map(id, known), *(id(table[name]) for table, name in self._places)}
        self._untrained = {}
        for name, parameter in module.named_parameters():
            if id(parameter) in ids or not isinstance(parameter, nn.Parameter):
                continue
            if parameter.requires_grad:
                self.forget()  # said again at the next forward, if this one fails
                return f"parameter {name!r} has replaced another one, or was added, after the first training step"
            self._untrained[name] = parameter
        if not takes_up and self._newcomers(module):
            self.forget()
        own = set(map(id, module.parameters()))
        if not self.is_computed and any(one.requires_grad and id(one) not in own for one in known):
            self.forget()  # what was taken away is neither kept nor sent any longer, from a forward on that takes it up
            return "a parameter was taken away after the first training step" if takes_up else ""
        return ""

    def newcomers(self, module: nn.Module) -> set[str]:
        """Names of what is not trained and has come since this was last asked: parameters, buffers of parts."""
        names = self._newcomers(module)
        self._told = [weakref.ref(one) for one in self._untrained.values()]
        self.taken_up(module)
        return names

    def _newcomers(self, module: nn.Module) -> set[str]:
        told = {id(reference()) for reference in self._told}
        return {name for name, one in self._untrained.items() if id(one) not in told} | {
            name
            for prefix, part in module.named_modules()
            if part not in self._parts and not isinstance(part, torch.jit.ScriptModule)
            for name, _ in part.named_buffers(prefix, recurse=False)
        }

    def forget(self) -> None:
        """Have the next look find something new."""
        self._structure = None

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Inside, computed parameters hand their gradient on complete: the mean over the ranks of an image of what they have."""
        # Without gradients nobody has looked whether they are still there.
        places = self._places if torch.is_grad_enabled() else []
        before = [(table, name, table[name]) for table, name in places]
        try:
            for table, name, value in before:
                if value is not None and value.requires_grad:
                    table[name] = Given.apply(value, self._layout.spatial_mesh)
            yield
        finally:
            for table, name, value in before:
                table[name] = value


def _is_computed(value: torch.Tensor) -> bool:
    return not isinstance(value, (nn.Parameter, DTensor))


def _is_functional() -> bool:
    """Whether `torch.func.functional_call` runs on this thread: what it puts in a parameter's place may be one, too."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
