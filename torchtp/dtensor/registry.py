"""The table of rules: aten op -> handler, entered by decorators and installed on DTensor in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchtp.dtensor.nesting import guarded, guarded_composite
from torchtp.dtensor.outside import is_averaged, note_backward
from torchtp.dtensor.parts import written
from torchtp.dtensor.sharing import average_for_others, hand_out
from torchtp.dtensor.sums import holds_sum, link_views, write_into_sum
from torchtp.dtensor.tracing import traced, tracing
from torchtp.dtensor.upstream import DTensor, Op, is_known, is_plain, passthrough, taken_apart
from torchtp.dtensor.whole import hand_in
from torchtp.dtensor.wrapping import called

Handler = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]

# "aten::name.overload" (no dot for the default overload) -> handler. The second table is for ops that upstream treats well
# enough where nothing is cut over a spatial axis: installed when the first such axis is seen, so that others pay nothing.
RULES: dict[str, Handler] = {}
SPATIAL_RULES: dict[str, Handler] = {}
# Composite ops, which are taken apart before DTensor sees them, where their parts would do the wrong thing to a cut one.
COMPOSITE_RULES: dict[str, Handler] = {}
# Ops of other libraries: "torchvision::roi_align" -> handler; and what derives them in place of the library's own function, which it
# is left to where the handler gives NotImplemented.
LIBRARY_RULES: dict[str, Handler] = {}
LIBRARY_FUNCTIONS: dict[str, Handler] = {}
_libraries: dict[str, torch.library.Library] = {}
_custom: set[str] = set()
# Namespaces of torch and of torchtp itself.
_OF_TORCH = {
    "aten", "prim", "prims", "debugprims", "rngprims", "torchtp", "c10d", "c10d_functional", "_c10d_functional",
    "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem", "streams", "inductor", "_inductor_test", "higher_order",
    "profiler", "export", "static_runtime", "quantized", "_quantized", "quantization", "quantized_decomposed", "mkldnn",
    "mkldnn_prepacked", "mkl", "onednn", "prepacked", "sparse", "_test", "debug_mode_ops", "flex_lib", "onnx",
    "onnx_symbolic", "image", "_native", "_native_aot", "coor", "flex_gemm", "inductor_prims",
}  # fmt: skip


def rule(*names: str) -> Callable[[Handler], Handler]:
    """Enter a handler for ops of aten: "add" (all overloads but out=), "add.Tensor" (that one), "max." (the default)."""
    return lambda handler: _enter(RULES, names, handler)


def spatial_rule(*names: str) -> Callable[[Handler], Handler]:
    """The same, in force once some mesh axis is known to cut images."""
    return lambda handler: _enter(SPATIAL_RULES, names, handler)


def composite_rule(name: str) -> Callable[[Handler], Handler]:
    """Enter a handler, made of differentiable ops, for a composite op of aten that meets a DTensor on a spatial mesh."""

    def enter(handler: Handler) -> Handler:
        if hasattr(torch.ops.aten, name.partition(".")[0]):
            COMPOSITE_RULES[name] = handler
        return handler

    return enter


def library_rule(name: str) -> Callable[[Handler], Handler]:
    """Enter a handler for an op of another library, whose name it has with its namespace."""
    return lambda handler: LIBRARY_RULES.setdefault(name, handler)


def library_function(name: str) -> Callable[[Handler], Handler]:
    """Enter what derives such an op: a handler made of differentiable ops, which gives NotImplemented for what it leaves to the library."""
    return lambda handler: LIBRARY_FUNCTIONS.setdefault(name, handler)


def _enter(table: dict[str, Handler], names: tuple[str, ...], handler: Handler) -> Handler:
    for name in names:
        packet, dot, overload = name.partition(".")
        if not hasattr(torch.ops.aten, packet):
            continue  # not in this torch
        for each in getattr(torch.ops.aten, packet).overloads():
            if (each == (overload or "default")) if dot else not _gives_out(packet, each):
                table["aten::" + packet + ("" if each == "default" else "." + each)] = handler
    return handler


def _gives_out(packet: str, overload: str) -> bool:
    """Whether it is the form of an op that takes `out=`, which most, but not all, are named for."""
    if overload == "default" or "out" in overload:
        return overload != "default"
    return any(argument.is_out for argument in torch._C._get_schema(f"aten::{packet}", overload).arguments)


def install(name: str, handler: Handler) -> None:
    """Have DTensor dispatch the op of that qualified name ("aten::add.Tensor") to `handler`."""
    namespace = name.split("::")[0]
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")  # never undone

    handler = guarded(handler)

    def dispatch(_cls: type, op: Op, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if tracing() is not None:
            return traced(op, args, kwargs or {})
        kwargs = kwargs or {}
        note_backward((args, kwargs))
        _mind_others(args)
        outer, called.now = called.now, (op, args, kwargs)
        try:
            results = handler(op, args, kwargs)
            if op.is_view and args and holds_sum(args[0]):
                link_views(op, handler, args, kwargs, results)
            if kwargs and op._schema.is_mutable:  # out=
                _tell_written(op, args, kwargs)
            return results
        finally:
            called.now = outer

    def dispatch_in_place(_cls: type, op: Op, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if tracing() is not None:
            return traced(op, args, kwargs or {})
        note_backward((args, kwargs))
        _mind_others(args)
        if not isinstance(args[0], DTensor) and any(map(is_plain, pytree.tree_leaves(args[0]))):
            _mind_gradients(args, kwargs)
        if holds_sum(args[0]):
            result = write_into_sum(op, handler, args, kwargs or {})
        else:
            result = handler(op, args, kwargs or {})
        if isinstance(args[0], DTensor):
            written(args[0])
        elif isinstance(args[0], (list, tuple)):  # _fused_adam_
            _tell_written(op, args, kwargs or {})
        return result

    packet = name.split("::")[1].split(".")[0]
    in_place = packet.startswith("__i") if packet.endswith("__") else packet.endswith("_")
    torch.library.register_torch_dispatch(name, DTensor, dispatch_in_place if in_place else dispatch, lib=library)


def _tell_written(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`written` of everything that the op writes into."""
    for argument, given in zip(op._schema.arguments, bound(op, args, kwargs), strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(tensor, DTensor):
                    written(tensor)


def _may_need_averaging(arg: Any) -> bool:
    if type(arg) is not torch.Tensor and (type(arg) is not nn.Parameter or is_averaged(arg)):
        return False
    return bool(arg.requires_grad)


def _mind_gradients(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Prepare what is written into a plain tensor, and what is there, for gradients that come back in the other form.

    Where nothing takes a gradient, one rank alone may write: the loss into a list that it prints.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(tensor.requires_grad for tensor in tensors):
        return
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            hand_in(tensor)
        else:
            hand_out(tensor)


def _mind_others(args: tuple[Any, ...]) -> None:
    """Before something plain meets a cut tensor: people's own functions, and what nobody averages, get its gradient averaged."""
    plain = [arg for arg in args if _may_need_averaging(arg)]
    tensors: list[Any] = []  # in lists
    for arg in args:
        if type(arg) is list and arg and not isinstance(arg[0], (int, float)):
            tensors += arg
            plain += filter(_may_need_averaging, arg)
    lead = next((arg for arg in (*args, *tensors) if isinstance(arg, DTensor)), None) if plain else None
    if lead is not None:
        for tensor in plain:
            average_for_others(tensor, lead.device_mesh)


def install_rules() -> None:
    """Install every row of the first table."""
    for name, handler in RULES.items():
        install(name, handler)


def install_spatial_rules(otherwise: Handler, left: tuple[str, ...], takes: Callable[[Any], bool]) -> None:
    """Install the composite ones for calls with an argument it `takes`, the second table, and `otherwise` for every op of aten in no table whose name is not in `left`."""
    for name, composite in COMPOSITE_RULES.items():
        _install_composite(name, composite, takes)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and name not in RULES:
            handler = SPATIAL_RULES.get(name)
            packet, _, overload = name[6:].partition(".")
            if handler is None and packet in left:
                if not _gives_out(packet, overload or "default"):
                    continue
                handler = passthrough  # to tell the parts of what it has written
            install(name, handler or otherwise)


def install_custom(otherwise: Handler) -> None:
    """Install `otherwise` for ops of other libraries, torchvision's or a user's own, where neither says what a DTensor is to them."""
    find = torch._library.simple_registry.singleton.find

    def unruled(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (passthrough if is_known(op) else otherwise)(op, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names():
        if name.split("::")[0] in _OF_TORCH or name in _custom:
            continue
        _custom.add(name)
        if find(name).torch_dispatch_rules.find(DTensor) is None:
            install(name, LIBRARY_RULES.get(name, unruled))
            if name in LIBRARY_FUNCTIONS:
                _install_function(name, LIBRARY_FUNCTIONS[name])


def _install_composite(name: str, handler: Handler, takes: Callable[[Any], bool]) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    handler = guarded_composite(handler)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not any(map(takes, args)):
            return taken_apart(op, args, kwargs)
        _mind_others(args)
        return handler(op, args, kwargs)

    library = _libraries.setdefault("aten, kernels", torch.library.Library("aten", "IMPL"))
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
        library.impl(name, kernel, key)


def _install_function(name: str, handler: Handler) -> None:
    namespace, _, packet = name.partition("::")
    op = getattr(getattr(torch.ops, namespace), packet).default
    handler = guarded_composite(handler)
    library = _libraries.setdefault(namespace + ", kernels", torch.library.Library(namespace, "IMPL"))
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
        theirs = torch.library.get_kernel(op, key)

        def kernel(keys: Any, *args: Any, theirs: Any = theirs, **kwargs: Any) -> Any:
            if tracing() is None and any(isinstance(arg, DTensor) for arg in args):
                result = handler(op, args, kwargs)
                if result is not NotImplemented:
                    return result
            return theirs.call_boxed(keys, *args, **kwargs)

        library.impl(packet, kernel, key, with_keyset=True)


@cache
def _signature(op: Op) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    arguments = op._schema.arguments
    return tuple(argument.name for argument in arguments), tuple(argument.default_value for argument in arguments)


def bound(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call, in the order of the schema, defaults filled in."""
    names, defaults = _signature(op)
    if len(args) == len(names):
        return args
    return args + tuple(kwargs.get(names[i], defaults[i]) for i in range(len(args), len(names)))


def named_arguments(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    return dict(zip(_signature(op)[0], bound(op, args, kwargs), strict=True))


def words(text: str) -> tuple[str, ...]:
    """The names in a table that is written as running text."""
    return tuple(text.split())
