"""Which modules, parameters and buffers a module is made of, to see at every call whether they are still the same."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import nn


class Structure:
    """The children and parameters of a module and of all modules in it, and how many buffers, at one moment."""

    def __init__(self, root: nn.Module):
        self._tables: list[tuple[dict[str, Any], list[Any]]] = []
        self._buffers: list[tuple[dict[str, Any], int]] = []  # themselves are replaced by many a forward
        for module in root.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # whose tables are made anew at each look
                for table in (module._modules, module._parameters):
                    self._tables.append((table, list(table.values())))
                self._buffers.append((module._buffers, len(module._buffers)))

    def still_holds(self) -> bool:
        """Whether nothing was replaced, added or taken away since. About a microsecond a module."""
        return all(len(table) == before for table, before in self._buffers) and all(
            len(table) == len(before) and all(map(is_, table.values(), before)) for table, before in self._tables
        )
