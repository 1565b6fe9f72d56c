"""Gradients that a program takes by `torch.autograd.grad` of parameters of parallelized modules: complete ones, as all ranks have them.

Whatever was made of the images: outputs, features that a hook has kept, penalties on gradients, several calls of a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from torchtp import _C
from torchtp.dtensor.outside import is_cut_backward
from torchtp.dtensor.sharing import share_gradient

# The name of the group whose ranks have each a part of a parameter's gradient.
_groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def are_shared(parameters: Iterable[torch.Tensor], group_name: str) -> None:
    """Of these, plain leaf tensors, each rank of that group has a part of the gradient from now on."""
    for parameter in parameters:
        _groups[parameter] = group_name


def roots(outputs: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Any]:
    """The nodes that a backward from `outputs` begins with."""
    for output in outputs:
        if isinstance(output, GradientEdge):
            yield output.node
        elif output.requires_grad:
            yield get_gradient_edge(output).node


@contextmanager
def completed(outputs: Iterable[torch.Tensor | GradientEdge], inputs: Iterable[Any]) -> Iterator[None]:
    """Inside, a backward from `outputs` that takes the gradients of `inputs` gives those of shared parameters complete."""
    by_group: dict[str, dict[int, torch.Tensor]] = {}  # each once, by its id
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf and (name := _groups.get(tensor)) is not None:
            by_group.setdefault(name, {})[id(tensor)] = tensor
    with ExitStack() as hooks:
        taken = [
            _C.CapturedGradients(list(parameters.values()), name, share_gradient, is_cut_backward)
            for name, parameters in by_group.items()
        ]
        for node in roots(outputs) if taken else ():
            for each in taken:
                hooks.callback(node.register_prehook(lambda _, begin=each.begin: begin()).remove)
        yield
