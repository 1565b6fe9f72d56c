"""Who asks for a parallelized module's forward and can't have it: it talks to other ranks, and its tensors have no storage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.utils import _pytree as pytree


def refuse_transforms(module: nn.Module, inputs: Any) -> None:
    """Raise RuntimeError inside torch.export, torch.jit.trace, torch.fx and the transforms of torch.func, and for dual tensors."""
    if torch.compiler.is_exporting():
        what, remedy = "torch.export", "export the module as it is without parallelize, with its state_dict()"
    elif torch.jit.is_tracing():
        what, remedy = "torch.jit.trace", "trace the module as it is without parallelize, with its state_dict()"
    elif _symbolic_trace.is_fx_symbolic_tracing():
        what, remedy = "torch.fx.symbolic_trace", "trace the module before parallelize, which takes a GraphModule"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        what, remedy = "torch.func (grad, vmap, jvp and their kin)", "use backward() or torch.autograd.grad"
    elif forward_ad._current_level >= 0 and _has_tangent([inputs, *module.parameters(), *module.buffers()]):
        what, remedy = "forward-mode AD (torch.autograd.forward_ad)", "use backward() or torch.autograd.grad"
    else:
        return
    raise _cannot(what, remedy)


def refuse_ended(group: dist.ProcessGroup) -> None:
    """Raise RuntimeError where the group was destroyed, before anything is sent."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:
        raise RuntimeError(
            "the process group of this parallelized module's mesh was destroyed: after init_process_group make the mesh, "
            "the layout and the module anew, and give it this one's state_dict()"
        ) from error


def refuse_script() -> None:
    """Raise RuntimeError for torch.jit.script, which asks a module before it reads its code."""
    raise _cannot("torch.jit.script", "script the module as it is without parallelize, with its state_dict()")


def _cannot(what: str, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"{what} can't see through a parallelized module, which exchanges data with other ranks: {remedy}"
    )


def _has_tangent(nested: Any) -> bool:
    tensors = (leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
