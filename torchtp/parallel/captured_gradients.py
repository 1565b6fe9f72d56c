"""Gradients that a program takes by `torch.autograd.grad` of parameters of parallelized modules, and of what is made of them: complete ones.

Whatever was made of the images: outputs, features that a hook has kept, penalties on gradients, several calls of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from torchtp import _C
from torchtp.dtensor.outside import is_cut_backward, mesh_of_backward
from torchtp.dtensor.sharing import share_gradient
from torchtp.dtensor.upstream import DTensor, current_backward, is_plain
from torchtp.dtensor.whole import whole_gradient

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


Complete = Callable[[Sequence[Any]], tuple[Any, ...]]


@contextmanager
def completed(
    outputs: Iterable[torch.Tensor | GradientEdge], inputs: Sequence[torch.Tensor | GradientEdge]
) -> Iterator[Complete]:
    """Inside, a backward from `outputs` gives the gradients of those `inputs` complete that are shared parameters.

    What it gives for others, of which plain ones may have been made in a forward, goes through what this yields.
    """
    by_group: dict[str, dict[int, torch.Tensor]] = {}  # each once, by its id
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf and (name := _groups.get(tensor)) is not None:
            by_group.setdefault(name, {})[id(tensor)] = tensor
    made = [number for number, one in enumerate(inputs) if _is_made(one)]
    tasks: list[int] = []

    def complete(grads: Sequence[Any]) -> tuple[Any, ...]:
        mesh, given = mesh_of_backward(tasks[0]) if tasks else None, list(grads)
        if mesh is None:
            return tuple(given)
        for number in made:
            grad = given[number]
            if grad is not None and (is_plain(inputs[number]) or is_plain(grad)):
                given[number] = whole_gradient(grad, mesh)
        return tuple(given)

    with ExitStack() as hooks:
        taken = [
            _C.CapturedGradients(list(parameters.values()), name, share_gradient, is_cut_backward)
            for name, parameters in by_group.items()
        ]
        for node in roots(outputs) if taken or made else ():
            for each in taken:
                hooks.callback(node.register_prehook(lambda _, begin=each.begin: begin()).remove)
            if made:
                hooks.callback(node.register_prehook(lambda _: tasks.append(current_backward())).remove)
        yield complete


@contextmanager
def completed_on_tensors(inputs: Iterable[Any]) -> Iterator[None]:
    """Inside, a backward that keeps gradients in the `grad` of `inputs` keeps complete ones in what is made."""
    with ExitStack() as hooks:
        for tensor in {id(one): one for one in inputs if _is_made(one) and is_plain(one)}.values():
            hooks.callback(tensor.register_hook(_complete).remove)
        yield


def _complete(grad: torch.Tensor) -> torch.Tensor:
    mesh = mesh_of_backward(current_backward())
    return grad if mesh is None else whole_gradient(grad, mesh)


def _is_made(one: torch.Tensor | GradientEdge) -> bool:
    """Whether it is neither cut, as far as one can tell, nor a leaf."""
    if isinstance(one, DTensor):
        return False
    if isinstance(one, GradientEdge):
        return not hasattr(one.node, "variable")
    return one.grad_fn is not None
