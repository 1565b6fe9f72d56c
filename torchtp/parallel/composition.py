"""What a parallelized module is made of at each forward, and parameters of it that are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

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
        self.parameters: frozenset[int] = frozenset()  # their ids

    @property
    def is_computed(self) -> bool:
        """Whether tensors stand in for parameters, as under `torch.func.functional_call`."""
        return bool(self._places)

    def look(self, module: nn.Module) -> bool:
        """Whether a module or parameter was replaced, added or taken away since the last look."""
        if self._structure is not None and self._structure.still_holds():
            return False
        self._structure = Structure(module)
        self._places = [
            (part._parameters, name)
            for part in module.modules()
            if not isinstance(part, torch.jit.ScriptModule)
            for name, value in part._parameters.items()
            if value is not None and not isinstance(value, (nn.Parameter, DTensor))
        ]
        self.parameters = frozenset(map(id, module.parameters()))
        self.share(module)
        return True

    def share(self, module: nn.Module) -> None:
        """Have gradients complete that are taken of the module's parameters from now on."""
        if self._layout.num_shards > 1:
            plain = [one for one in module.parameters() if one.is_leaf and not isinstance(one, DTensor)]
            are_shared(plain, self._layout.spatial_group.group_name)

    def forget(self) -> None:
        """Have the next look find something new."""
        self._structure = None

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Inside, computed parameters hand their gradient on complete: the mean over the ranks of an image of what they have."""
        before = [(table, name, table[name]) for table, name in self._places]
        try:
            for table, name, value in before:
                if value is not None and value.requires_grad and torch.is_grad_enabled():
                    table[name] = Given.apply(value, self._layout.spatial_mesh)
            yield
        finally:
            for table, name, value in before:
                table[name] = value
