"""The one file that touches private names of torch's DTensor (the same on torch 2.11 to 2.15)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeGuard, cast

import torch
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
    redistribute_local_tensor,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import return_and_correct_aliasing

try:
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError:  # pragma: no cover (no such name on some torch: then nothing is one)

    class StridedShard(Shard):  # type: ignore[no-redef]
        """Never born."""


Op = Any  # an OpOverload
_Key, _excluded = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard

__all__ = [
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Op",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "become",
    "current_backward",
    "forget_shapes",
    "hold",
    "in_backward",
    "is_known",
    "is_plain",
    "local_of",
    "make_dtensor",
    "make_spec",
    "nested_dims",
    "node_in_backward",
    "on_plain",
    "passthrough",
    "plain_shard",
    "real_mesh",
    "redistributed",
    "spec_of",
    "suggest_memory_format",
    "travels_as_bytes",
]


def is_plain(leaf: Any) -> TypeGuard[torch.Tensor]:
    """A tensor that is no DTensor."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)


def plain_shard(placement: Placement) -> TypeGuard[Shard]:
    """Cut into consecutive pieces, as torch.chunk does it."""
    return type(placement) is Shard


@lru_cache(4096)
def nested_dims(placements: tuple[Placement, ...]) -> frozenset[int]:
    """The dims that several axes cut."""
    dims = [p.dim for p in placements if plain_shard(p)]
    return frozenset(dim for dim in dims if dims.count(dim) > 1)


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's part, outside autograd."""
    return tensor._local_tensor


def hold(tensor: DTensor, local: torch.Tensor) -> None:
    """Let this be the rank's part; the same elements."""
    tensor._local_tensor = local


def take_over(tensor: DTensor, values: DTensor) -> None:
    """Let it have the part and the spec of other values."""
    tensor._local_tensor, tensor._spec = values._local_tensor, values._spec


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements and global shape."""
    return tensor._spec


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """A spec with all that upstream wants to know of a tensor."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around a local tensor, outside autograd.

    Without its __init__, which initializes nothing and costs more than all the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def become(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], view: DTensor) -> DTensor:
    """For an op that changes the shape of args[0] in place: args[0] becomes `view`, what the op would return of a copy."""
    target: DTensor = args[0]
    target._local_tensor, target._spec = view._local_tensor, view._spec
    return return_and_correct_aliasing(op, args, kwargs, target)


# What gloo refuses to move.
_MOVED_AS_BYTES = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def travels_as_bytes(dtype: torch.dtype) -> bool:
    """Whether not every backend moves elements of that dtype: their bytes go instead."""
    return dtype in _MOVED_AS_BYTES or (dtype.itemsize == 1 and dtype.is_floating_point)


def forget_shapes() -> None:
    """Drop what DTensor and fake tensors remember of every shape that they have met: they never do by themselves."""
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()
    FakeTensorMode.cache_clear()


def redistributed(local: torch.Tensor, spec: DTensorSpec, placements: tuple[Placement, ...]) -> torch.Tensor:
    """The local tensor under other placements, outside autograd; collective over the axes that change."""
    if spec.placements == placements:
        return local
    if travels_as_bytes(local.dtype) and not any(isinstance(place, Partial) for place in spec.placements):
        return _redistributed_as_bytes(local, spec, placements)
    if nested_dims(spec.placements) or nested_dims(placements):
        first, *others = (
            axis for axis, pair in enumerate(zip(spec.placements, placements, strict=True)) if pair[0] != pair[1]
        )
        if others or nested_dims(spec.placements[first:]) or nested_dims(placements[first:]):
            return _redistributed_by_axis(local, spec, placements, first)
    target = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    return redistribute_local_tensor(local, spec, target)


def _redistributed_as_bytes(local: torch.Tensor, spec: DTensorSpec, placements: tuple[Placement, ...]) -> torch.Tensor:
    flat = local.contiguous().unsqueeze(-1).view(torch.uint8)
    shape = torch.Size((*spec.shape, flat.size(-1)))
    of_bytes = make_spec(spec.mesh, spec.placements, shape, make_contiguous_strides_for(shape), torch.uint8)
    return redistributed(flat, of_bytes, placements).contiguous().view(local.dtype).squeeze(-1)


def _redistributed_by_axis(
    local: torch.Tensor, spec: DTensorSpec, placements: tuple[Placement, ...], first: int
) -> torch.Tensor:
    """One axis from the `first` one on after the other, inner ones made whole first and cut last.

    Upstream takes several at once over the group of all, if there is one, as if their chunks were that group's: of a dim of
    33 over 2 x 2 ranks these are 9, 9, 9, 6, and those 9, 8, 8, 8 (torch 2.13).
    """
    changed = [axis for axis in range(first, len(placements)) if not isinstance(spec.placements[axis], Replicate)]
    steps: list[tuple[int, Placement]] = [(axis, Replicate()) for axis in reversed(changed)]
    steps += [(axis, place) for axis, place in enumerate(placements) if axis >= first]
    for axis, place in steps:
        now = (*spec.placements[:axis], place, *spec.placements[axis + 1 :])
        target = DTensorSpec(spec.mesh, now, tensor_meta=spec.tensor_meta)
        local = redistribute_local_tensor(local, spec, target) if now != spec.placements else local
        spec = target
    return local


def real_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself; while torch.compile makes a graph, a stand-in takes its place in DTensors."""
    return mesh.__dict__.get("real_obj", mesh)


def current_backward() -> int:
    """The number of the backward that autograd's engine runs on this thread; -1 where there is none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd's engine is running a derivative on this thread."""
    return current_backward() != -1


def node_in_backward(*names: str) -> tuple[int, int, Any] | None:
    """Graph task, sequence number and node of the derivative that autograd's engine runs on this thread, if it has one of the names."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in names:
        return None
    return current_backward(), node._sequence_nr(), node


def is_known(op: Op) -> bool:
    """Whether DTensor has been told how to shard the op, as by `register_sharding`."""
    propagator = cast(Any, DTensor._op_dispatcher).sharding_propagator
    tables = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    return any(op in getattr(propagator, table, ()) for table in tables)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


def is_composite(op: Op) -> bool:
    """Whether PyTorch makes the op of others before autograd; in inference mode nothing does, and DTensor meets it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def taken_apart(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a composite op is made of outside inference mode; `op.decompose` prefers formulas for compilers, where there are.

    Those are slower, and that of LSTMs in both directions gives states of four dims (torch 2.11).
    """
    return op._op_dk(_COMPOSITE, *args, **kwargs)


def is_of_lists(op: Op) -> bool:
    """Whether it does the same to each tensor of a list, as optimizers and clipping ask for."""
    return op.name().startswith("aten::_foreach_")


def one_by_one(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op of lists is made of on devices that have no kernel for it."""
    return op._op_dk(_EXPLICIT, *args, **kwargs)


def on_plain(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on plain tensors, as outside of a DTensor's dispatch.

    Inside, PyTorch leaves out what carries conjugations out, on which kernels that conjugate (pinv) lean: wrong numbers.
    """
    with _excluded(_Key.Conjugate, False), _excluded(_Key.Negative, False):
        return op(*args, **kwargs)


def passthrough(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What upstream does with an op whose dispatch we took over: propagate, redistribute, compute, wrap."""
    dispatcher = cast(Any, DTensor._op_dispatcher)
    handler = dispatcher._custom_op_handlers.get(op)
    if handler is not None:
        return handler(op, args, kwargs)
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    sharding = dispatcher._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
    if not isinstance(sharding, OutputSharding):
        return sharding
    info.output_sharding = sharding
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    schema = op._schema
    is_inplace = schema.name.endswith("_")
    is_out = "out" in schema.overload_name
    if is_inplace or is_out or (sharding.output_spec is None and op is torch.ops.aten.equal.default):
        return dispatcher._dispatch_fast_path_python_tail(
            op, args, kwargs, info.compute_mesh, sharding, results, True, is_inplace, is_out
        )
    if sharding.output_spec is None:
        return results
    wrapped = dispatcher.wrap(results, sharding.output_spec)
    return return_and_correct_aliasing(op, args, kwargs, wrapped) if schema._is_view_op() else wrapped
