"""Classes made from a module's own, which look like it: given to modules, found again by copies and pickles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import BuiltinMethodType
from typing import Any, cast

from torch import nn
from torch.nn.utils import parametrize

from torchtp.parallel import graph_modules


def reclass(module: nn.Module, make: Callable[..., type], *arguments: Any) -> None:
    """Give the module the class that `make(its own, *arguments)` makes.

    PyTorch's parametrizations put a class with their properties on top of the module's own, and take it off again by its
    bases and its members: what is made goes beneath it.
    """
    own = type(module)
    names = parametrized(module)
    if names and all(name in vars(own) for name in names):
        made = type(own.__name__, (make(own.__bases__[0], *arguments),), dict(vars(own)))
    else:
        made = make(own, *arguments)
    become(module, made)


def become(one: Any, made: type) -> None:
    """Not by a module's own `__setattr__`, which may refuse, or hand on to a part what it is given."""
    object.__setattr__(one, "__class__", made)


def parametrized(module: nn.Module) -> list[str]:
    """The names of the parameters that torch.nn.utils.parametrize has taken."""
    return list(cast(Any, module).parametrizations) if parametrize.is_parametrized(module) else []


class Remade:
    """Marks a class made from a module's own by `remade`; copies and pickles find it again through that one."""

    __slots__ = ()
    _torchtp_made_by: tuple[Callable[..., type], tuple[Any, ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, _recipe(self._torchtp_made_by), super().__reduce_ex__(2)[2]


def remade(base: type, marks: tuple[type, ...], members: dict[str, Any], make: Callable[..., type], *args: Any) -> type:
    """A subclass of `base` that looks like it; `make(base, *args)` makes it again in another process."""
    look = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    # The base's layout, whatever it inherits from first (ABC, Generic[T]): else no instance could be given the class.
    of_graph = graph_modules.members(base, lambda module: reclass(module, make, *args))
    members = {**look, "__slots__": (), "__reduce_ex__": Remade.__reduce_ex__, **of_graph, **members}
    with _unnoticed_by(base):
        made = type(base.__name__, (base, *marks), members)
    made._torchtp_made_by = (make, (base, *args))  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def _unnoticed_by(base: type) -> Iterator[None]:
    """Subclasses made inside are not told to `base.__init_subclass__`, which may want keywords, or enter them in a registry."""
    if isinstance(base.__init_subclass__, BuiltinMethodType):  # that of `object`
        yield
        return
    own = vars(base).get("__init_subclass__")
    cast(Any, base).__init_subclass__ = classmethod(lambda cls, **_: None)
    try:
        yield
    finally:
        if own is None:
            del cast(Any, base).__init_subclass__
        else:
            cast(Any, base).__init_subclass__ = own


def origin_of(made: type) -> type:
    """The class that `remade` began with."""
    while "_torchtp_made_by" in vars(made):
        made = cast(Any, made)._torchtp_made_by[1][0]
    return made


def _recipe(made_by: tuple[Callable[..., type], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What `made_by` says, down to a class that another process finds by its name."""
    make, (base, *arguments) = made_by
    return make, _recipe(base._torchtp_made_by) if "_torchtp_made_by" in vars(base) else base, *arguments


def _made(recipe: Any) -> Any:
    if isinstance(recipe, type):
        return recipe
    make, base, *arguments = recipe
    return make(_made(base), *arguments)


def _new(*recipe: Any) -> Any:
    made = _made(recipe)
    return made.__new__(made)
