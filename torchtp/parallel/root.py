"""The class of a parallelized module, made from its own: forward, copies, new parameters and attributes go through what it carries."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from torchtp.parallel import classes
from torchtp.parallel.refusals import refuse_script

STATE = "_torchtp"  # the attribute that holds what a parallelized module carries


class Root(classes.Remade):
    """Marks the class of a parallelized module."""

    __slots__ = ()


def is_parallelized(module: nn.Module) -> bool:
    """Whether `parallelize` was called on this very module."""
    return isinstance(module, Root) and STATE in module.__dict__


def root_class(base: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(base.__init__)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        if type(self) is made:  # another one, made by this one's type: a teacher, a slice of a Sequential
            classes.become(self, classes.origin_of(made))

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: Any = self.__dict__.get(STATE)
        if state is None:  # of a class that was made from this one's type
            return base.forward(self, *args, **kwargs)
        own, state.forward = state.forward, None  # which may call this one
        outer, state.under_way = state.under_way, own
        try:
            return state.call(self, own or functools.partial(base.forward, self), args, kwargs)
        finally:
            if state.forward is None:  # else this call has put another in its place
                state.forward = state.under_way
            state.under_way = outer

    def apply_to_all(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        applied = base._apply(self, *args, **kwargs)
        if is_parallelized(self):
            getattr(self, STATE).parameters_changed()
        return applied

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if name == "forward" and is_parallelized(self):
            getattr(self, STATE).forward = value
        else:
            base.__setattr__(self, name, value)

    def delete_attribute(self: nn.Module, name: str) -> None:
        state: Any = self.__dict__.get(STATE) if name == "forward" else None
        if state is not None and (state.forward or state.under_way) is not None:
            state.forward = state.under_way = None
        else:
            base.__delattr__(self, name)

    def set_state(self: nn.Module, state: Any) -> None:
        base.__setstate__(self, state)
        if is_parallelized(self):
            own = getattr(self, STATE)
            for part in self.modules():  # which left their gradients to what this one is a copy of
                if part is not self and is_parallelized(part):
                    getattr(part, STATE).hand_over(own)
            own.await_gradients(self)  # a copy's own; parameters are copied without hooks

    members = {
        "forward": forward,
        "_apply": apply_to_all,
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "__setstate__": set_state,
        "__init__": initialize,
        "__prepare_scriptable__": lambda self: refuse_script(),
    }
    made = classes.remade(base, (Root,), members, root_class)
    return made
