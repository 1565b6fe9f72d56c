"""Modules made by torch.fx, as torchvision's feature extractors: each has a class of its own, which holds its code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_OURS = "_torchtp"  # what attributes of this package's begin with


def members(base: type, remake: Callable[[Any], None]) -> dict[str, Any]:
    """Of a class made from `base`, if that is such a one: code goes on going into `base`, and a copy is remade as well.

    torch.fx would compile into the class that it finds, over what was put on top, and give a copy another class.
    """
    if not issubclass(base, torch.fx.GraphModule):
        return {}
    own: Any = base

    def recompile(self: Any) -> Any:
        made, self.__class__ = type(self), own
        try:
            return own.recompile(self)
        finally:
            self.__class__ = made

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        copied = own.__deepcopy__(self, memo)
        remake(copied)
        ours = {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name.startswith(_OURS)}
        copied.__setstate__(ours)
        return copied

    return {"recompile": recompile, "__deepcopy__": deepcopy, "__reduce_ex__": own.__reduce_ex__}
