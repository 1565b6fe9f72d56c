"""What torch.compile must know of the ops: those that talk to other ranks are ordered effects.

Else a graph would drop a pull whose rows one rank does not use, or order two of them otherwise than its neighbour, and
the ranks would wait for each other. An op that changes an argument (batch_norm: running statistics) can't be one, and
keeps its place by that. Private names of torch stand only here; the same in 2.11 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")

EFFECTS = (
    "pull",
    "push_add",
    "convolution",
    "convolution_backward",
    "max_pool",
    "max_pool_backward",
    "max_pool_gather",
    "avg_pool",
    "avg_pool_backward",
    "batch_norm_backward",
    "depthwise_layer_norm",
    "group_norm",
    "group_norm_backward",
    "interpolate",
    "interpolate_backward",
)


def register() -> None:
    """Mark the ops that communicate."""
    # Not at the top: under a torch that is too old, loading the compiled module says so first.
    from torch._higher_order_ops.effects import _register_effectful_op
    from torch._library.effects import EffectType

    for name in EFFECTS:
        _register_effectful_op(getattr(torch.ops.torchtp, name).default, EffectType.ORDERED)


def eagerly(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """The function as torch.compile never compiles it. Nothing of the compiler is imported, which takes seconds, before others do."""
    disabled: list[Callable[Params, Result]] = []

    @wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


@cache
def leave_eager() -> None:
    """Have torch.compile never compile what rules do, nor what they call.

    Around a training step it would look at each frame of a backward: they talk to other ranks while it tries them out.
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for name, module in list(sys.modules.items()):
        if name.startswith(
            ("torchtp.dtensor.", "torchtp.parallel.lazy", "torchtp.parallel.randomness", "torchtp.parallel.leaving")
        ):
            for value in vars(module).values():
                for code in _codes_of(value, module.__name__):
                    eval_frame.set_code_exec_strategy(code, skip)


def _codes_of(value: object, module: str) -> Iterator[CodeType]:
    """The code of a function or of all methods of a class of that module, and of what is defined inside."""
    if isinstance(value, type) and value.__module__ == module:
        for member in vars(value).values():
            yield from _codes_of(getattr(member, "__func__", member), module)
    elif isinstance(value, FunctionType) and value.__module__ == module:
        pending = [value.__code__]
        while pending:
            code = pending.pop()
            yield code
            pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
