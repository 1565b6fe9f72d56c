"""What torch.compile makes of DTensors: what is done to cut images is left to run, all else is upstream's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtp.dtensor.cut import axes_of
from torchtp.dtensor.upstream import DTensor, Op, local_of, passthrough, spec_of

tracing = torch._guards.TracingContext.try_get  # not None while a graph is being made


def traced(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place of a rule, while a graph is made: rules keep what they know on meshes, and talk to other ranks."""
    if any(_is_let_in(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
        from torch._dynamo.exc import Unsupported

        raise Unsupported(f"torchtp does not compile {op} of a cut image, it runs as it is")  # the graph ends before it
    return passthrough(op, args, kwargs)


# What comes after Dynamo derives and rewrites what that has let into a graph, and has other tensors inside DTensors.
def _is_let_in(tensor: object) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    fake = torch._subclasses.fake_tensor.FakeTensor
    return isinstance(local_of(tensor), fake) and bool(axes_of(spec_of(tensor).mesh).spatial)
