"""Parameters that stay plain and still meet cut activations: an alias that decides by its partners.

While a parallelized module runs, `module.gamma` is the parameter as a `Lazy`: beside a DTensor it acts as replicated on
that DTensor's mesh, beside plain tensors it is itself. What is made of Lazy tensors and plain ones stays Lazy.
The gradient handed to the parameter obeys the mean rule (see `torchtp.dtensor.sharing.share`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchtp.dtensor.cut import full_of
from torchtp.dtensor.registry import RULES, SPATIAL_RULES
from torchtp.dtensor.sharing import Replicated
from torchtp.dtensor.spatial import is_marked, on_first_mark
from torchtp.dtensor.upstream import is_plain
from torchtp.parallel import classes
from torchtp.parallel.canvas import Canvas, plainly
from torchtp.parallel.remembered import remembered
from torchtp.parallel.running import is_inside, is_running, writes, written_now

# Functions and modules that take their parameters plain, by the aten op whose rule hands out gradients by the mean rule.
_PLAIN_BY_RULE: dict[str, tuple[tuple[Any, ...], tuple[type, ...]]] = {
    "convolution": (
        (
            *(getattr(F, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)),
            *(getattr(torch, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)),
            torch.convolution,
        ),
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    ),
    "native_batch_norm": ((F.batch_norm, torch.batch_norm), (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)),
    "native_layer_norm": ((F.layer_norm, torch.layer_norm), (nn.LayerNorm,)),
    "native_group_norm": ((F.group_norm, torch.group_norm), (nn.GroupNorm,)),
    "linear": ((F.linear,), (nn.Linear,)),
}
_ruled = [_PLAIN_BY_RULE[name] for name in _PLAIN_BY_RULE if f"aten::{name}" in RULES | SPATIAL_RULES]
_TAKES_PLAIN = {function for functions, _ in _ruled for function in functions}
_KEEPS_PLAIN = {module for _, modules in _ruled for module in modules}  # hand their parameters to nothing else


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ORIGIN = "_torchtp_origin"


class Lazy(torch.Tensor):
    """A parameter, a buffer or something made of them, seen from inside a parallelized module's forward.

    What is done to it (`data = ...`, `resize_`, `requires_grad_`, attributes) is done to the tensor it stands for.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "_is_param":  # by which `isinstance(module.gamma, nn.Parameter)` goes
            return isinstance(_unlazy(self), nn.Parameter)
        return getattr(_unlazy(self), name)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # the one method that PyTorch tells no subclass of
        _unlazy(self).set_(*map(_unlazy, args), **{name: _unlazy(value) for name, value in kwargs.items()})
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_backward_hooks":  # autograd itself, of an alias that a Function changes, under a lock
            with torch._C.DisableTorchFunctionSubclass():
                super().__setattr__(name, value)
        elif hasattr(torch.Tensor, name):
            super().__setattr__(name, value)
        else:
            setattr(_unlazy(self), name, value)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            partner = _cut_partner(args, kwargs)
            if kwargs.get("out") is not None:
                _note_written(func, [], _unlazy(kwargs["out"]))
            if partner is None:
                plain = _each(_itself, args)
                result = func(*plain, **_each(_itself, kwargs))
                _note_written(func, plain)
                return args[0] if plain and result is plain[0] else _each(_lazy, result)
            if func == _SET_DATA and partner is not args[0]:  # what is cut has no place in a parameter or a buffer
                plain = _each(_unlazy, _each(_whole, args))
                func(*plain)
                _note_written(func, plain)
                return None
            if func is torch.autograd.grad:  # its inputs are what the graph was made of
                return func(*_each(_itself, args), **_each(_itself, kwargs))
            if writes(func):
                plain = _each(_itself, args)
                written = func(*plain, **_each(_itself, kwargs))
                _note_written(func, plain)
                return args[0] if written is not None else None
            if func in _TAKES_PLAIN and not _is_made(args, kwargs):
                return func(*_each(_unlazy, args), **_each(_unlazy, kwargs))
            mesh = partner.device_mesh

            def beside(leaf: Any) -> Any:
                return _beside(leaf, mesh)

            return func(*_each(beside, args), **_each(beside, kwargs))


def prepare(root: nn.Module) -> None:
    """Have the parameters and buffers of all modules under `root` read as Lazy while a parallelized forward runs."""
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # what TorchScript runs meets them plain, as rules do
        names = [*module._parameters, *module._buffers, *classes.parametrized(module)]
        if issubclass(type(module), _Prepared):  # what was added since
            names = [name for name in names if not isinstance(getattr(type(module), name, None), property)]
        if names and type(module) not in _KEEPS_PLAIN:
            classes.reclass(module, _prepared, tuple(names))


Buffers = list[tuple[dict[str, Any], dict[str, Any]]]  # tables of modules, and what they held before a forward


def settle_buffers(before: Buffers) -> set[int]:
    """Make buffers plain that a forward made of Lazy tensors or cut ones; the `addresses` of all that it replaced."""
    replaced = []
    for table, buffers in before:
        for name, buffer in table.items():
            if isinstance(buffer, (Lazy, DTensor, Canvas)):
                table[name] = buffer.full_tensor() if isinstance(buffer, DTensor) else plainly(_unlazy(buffer))
            if table[name] is not buffers.get(name):
                replaced.append(table[name])
    return addresses(replaced)


@contextlib.contextmanager
def given_back_buffers(modules: Iterable[nn.Module]) -> Iterator[Buffers]:
    """Around a forward, for `settle_buffers`; where it raises, what only that would make plain is that of before.

    Other ranks may have raised elsewhere, so that nothing can be gathered.
    """
    before = [(cast(dict[str, Any], part._buffers), dict(part._buffers.items())) for part in modules]
    try:
        yield before
    except BaseException:
        for table, buffers in before:
            for name, buffer in list(table.items()):
                if isinstance(buffer, (Lazy, DTensor, Canvas)):
                    if name in buffers:
                        table[name] = buffers[name]
                    else:
                        del table[name]
        raise


def unwrap(value: Any) -> Any:
    """Lazy tensors and canvases as plain ones, everywhere in a nested value."""
    return pytree.tree_map(lambda leaf: plainly(_unlazy(leaf)), value)


def given_out(value: Any) -> Any:
    """A tensor that leaves a forward as a plain one, of the graph that has used it: hooks put on it afterwards see its whole gradient."""
    value = _itself(value)
    if isinstance(value, Lazy):
        value.__dict__.pop(_ORIGIN, None)
        classes.become(value, torch.Tensor)
    return plainly(value)


class _Prepared(classes.Remade):
    __slots__ = ()


@remembered
def _prepared(base: type, names: tuple[str, ...]) -> type:
    return classes.remade(base, (_Prepared,), {name: alias(name) for name in names}, _prepared, names)


def alias(name: str) -> property:
    """A module's parameter or buffer of that name, Lazy while `is_running`.

    Once it is neither (pruning puts a computed tensor in a parameter's place), an attribute like any other.
    """

    def get(module: nn.Module) -> Any:
        value: torch.Tensor | None = module._parameters.get(name)
        if value is None:
            value = module._buffers.get(name)
        if value is None and name not in module._parameters and name not in module._buffers:
            if name not in module.__dict__:
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
            value = module.__dict__[name]
        if value is None or isinstance(value, (DTensor, Lazy)):
            return value
        return value if torch.compiler.is_compiling() or not is_running() else _lazy(value)

    def put(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value

    def remove(module: nn.Module) -> None:
        if name not in module.__dict__:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        del module.__dict__[name]

    return property(get, put, remove)


def _lazy(value: Any) -> Any:
    if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.layout is not torch.strided:
        return value
    if value.requires_grad or torch.is_grad_enabled():
        made = value.as_subclass(Lazy)
    else:  # no view, which as what an autograd.Function gives could not be written into
        made = torch.Tensor._make_subclass(Lazy, value)
    made.__dict__[_ORIGIN] = value
    return made


def _itself(value: Any) -> Any:
    """What `value` stands for; what an autograd.Function made is itself, as its hooks and its place in the graph are."""
    if not isinstance(value, Lazy):
        return value
    origin = value.__dict__.get(_ORIGIN)
    return value if origin is None or _has_history_of_its_own(value, origin) else origin


def _unlazy(value: Any) -> Any:
    itself = _itself(value)
    return itself.as_subclass(torch.Tensor) if isinstance(itself, Lazy) else itself


def _has_history_of_its_own(value: Lazy, origin: torch.Tensor) -> bool:
    """Whether an autograd.Function, whose forward returned or changed the alias, gave it a gradient: the origin does not have it."""
    with torch._C.DisableTorchFunctionSubclass():
        if not value.requires_grad:
            return False
        return not origin.requires_grad or (value.grad_fn is not None and value.grad_fn.name() != "AliasBackward0")


def _plain_parameters() -> None:
    """A parameter that a forward makes is of a plain tensor; one that it gives another name is itself."""
    theirs = nn.Parameter.__new__

    @functools.wraps(theirs)
    def new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        if is_inside() and isinstance(data, DTensor) and is_marked(data.device_mesh):
            data = _whole(data)
        return theirs(cls, plainly(_unlazy(data)), requires_grad)

    nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]
    nn.modules.module.register_module_parameter_registration_hook(lambda module, name, value: _unlazy(value))


on_first_mark(_plain_parameters)


def _whole(value: Any) -> Any:
    return full_of(value.detach()) if isinstance(value, DTensor) else value


def _each(change: Callable[[Any], Any], nested: Any) -> Any:
    """`change` on every leaf; pytree's way, but fast where little is nested."""
    kind = type(nested)
    if kind is tuple:
        return tuple([_each(change, item) for item in nested])
    if kind is list:
        return [_each(change, item) for item in nested]
    if kind is dict:
        return {key: _each(change, item) for key, item in nested.items()} if nested else nested
    if isinstance(nested, torch.Tensor):
        return change(nested)
    return pytree.tree_map(change, nested) if isinstance(nested, (tuple, list, dict)) else nested


def _cut_partner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    for value in args:
        if isinstance(value, DTensor):
            return value
    nested = [value for value in (*args, *kwargs.values()) if isinstance(value, (DTensor, list, tuple, dict))]
    return next((leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, DTensor)), None) if nested else None


def _note_written(func: Callable[..., Any], args: Sequence[Any], out: Any = None) -> None:
    """Keep where `func` wrote, if it did and a forward runs that asks for it."""
    written = written_now()
    if written is not None and (out is not None or (args and (func == _SET_DATA or writes(func)))):
        first = args[0] if out is None else out
        written.update(addresses(first if isinstance(first, (list, tuple)) else [first]))


def addresses(tensors: Iterable[Any]) -> set[int]:
    """Where the memory of the plain ones begins that hold numbers which images may have made; counters and flags do not."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if is_plain(tensor) and _is_inexact(tensor)} - {0}


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_made(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a weight, a bias or a statistic is made of cut activations: then the others meet it as DTensors too."""
    first = args[0] if args else kwargs.get("input")
    return any(isinstance(value, DTensor) and value is not first for value in (*args, *kwargs.values()))


def _beside(leaf: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
        return leaf
    return Replicated.apply(_unlazy(leaf), mesh)


class Scaled(torch.autograd.Function):
    """The tensor itself; its gradient times `factor`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None
