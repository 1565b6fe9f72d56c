"""One rank's training step without data and without partners: what it would keep, send and gather is counted.

Tensors live on the meta device; the mesh has groups of its own, which move nothing, and the caller's process groups are
not touched. Private names of torch's process groups and autograd nodes stand only here; the same in 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchtp import _C
from torchtp.dtensor import mark, notice
from torchtp.dtensor.cut import cut_locally
from torchtp.dtensor.upstream import Op, in_backward, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap
from torchtp.parallel import classes, lazy
from torchtp.parallel.images import cut_as_images
from torchtp.parallel.randomness import outside_torch
from torchtp.parallel.remembered import remembered
from torchtp.parallel.running import running
from torchtp.planning.measure import SavedBytes

_META = torch.device("meta")
_MODULE = "torchtp.module"  # in a node's metadata: the path of the module whose forward made it
_alone = threading.Lock()  # names of groups and modes of torch are the whole process's


@dataclass(frozen=True)
class Place:
    """An op, the path of the module that called it ("" for the outermost), and whether forward or backward did."""

    op: str
    module: str
    phase: str


@dataclass
class Counts:
    """What one rank did in one step."""

    kept_bytes: int = 0
    gathers: Counter[tuple[Place, tuple[int, ...], torch.dtype]] = field(default_factory=Counter)
    exchanged_bytes: Counter[Place] = field(default_factory=Counter)
    num_exchanges: Counter[Place] = field(default_factory=Counter)
    num_beyond: Counter[Place] = field(default_factory=Counter)
    collective_bytes: Counter[Place] = field(default_factory=Counter)
    num_collectives: Counter[Place] = field(default_factory=Counter)
    empty: dict[tuple[int, int], tuple[Place, int, int]] = field(default_factory=dict)


class _Mesh(DeviceMesh):
    """A mesh that one rank sees, equal to no other. Its groups can tell their rank and size, and nothing else."""

    def __init__(self, axes: tuple[str, ...], sizes: tuple[int, ...], coordinates: tuple[int, ...]):
        ranks = torch.arange(math.prod(sizes), device="cpu").view(sizes)
        names = tuple(f"{axis} of {sizes} rehearsed at {coordinates}" for axis in axes)
        rank = int(ranks[coordinates])
        super().__init__("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
        self._coordinates = coordinates
        self._groups = []
        for name, size, coordinate in zip(names, sizes, coordinates, strict=True):
            group = ProcessGroup(dist.HashStore(), coordinate, size)
            kind, backend = ProcessGroup.BackendType.CUSTOM, FakeProcessGroup._create_internal(coordinate, size)
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, backend)
            group._set_group_name(cast(Any, f"torchtp: {name}"))
            self._groups.append(group)
        self._dim_group_names = [group.group_name for group in self._groups]
        if len(axes) > 1:  # as a layout flattens its spatial mesh: sums over all axes are one collective
            flat = self._flatten_mapping["all"] = _Mesh(("all",), (math.prod(sizes),), (rank,))
            if hasattr(self._layout, "coalesce"):  # torch before 2.13 finds it by exactly this
                cast(Any, flat)._layout = self._layout.coalesce()

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        return self._groups[mesh_dim or 0]  # type: ignore[index]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._coordinates[mesh_dim or 0]  # type: ignore[index]

    @contextlib.contextmanager
    def registered(self) -> Iterator[list[str]]:
        """Inside, ops find the groups by their names, which are given."""
        with contextlib.ExitStack() as stack:
            for flat in self._flatten_mapping.values():
                stack.enter_context(cast(_Mesh, flat).registered())
            for group in self._groups:
                _register_process_group(group.group_name, group)
                stack.callback(_unregister_process_group, group.group_name)
                _C.set_exchange(group.group_name, "planned")
            yield [group.group_name for group in self._groups]


# DTensor keeps what it has met in its caches: the same rank of the same mesh is the same object every time.
_mesh = functools.cache(_Mesh)


class _Modules:
    """Which module's forward runs, or ran when the backward that runs now was recorded."""

    def __init__(self, root: nn.Module):
        self._running: list[str] = []
        for path, module in root.named_modules():
            module.register_forward_pre_hook(lambda _, args, path=path: self._enter(path, args))
            module.register_forward_hook(lambda _, args, outputs, path=path: self._leave(path, outputs))

    def _enter(self, path: str, inputs: Any) -> None:
        self._claim(inputs, self._running[-1] if self._running else "")
        self._running.append(path)

    def _leave(self, path: str, outputs: Any) -> None:
        self._running.pop()
        self._claim(outputs, path)

    def _claim(self, values: Any, path: str) -> None:
        """What led to `values` and belongs to no module yet belongs to `path`."""
        pending: list[Any] = [leaf.grad_fn for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        while pending:
            node = pending.pop()
            if node is not None and _MODULE not in node.metadata:
                node.metadata[_MODULE] = path
                pending.extend(before for before, _ in node.next_functions)

    def place(self, op: Op) -> Place:
        phase = "backward" if in_backward() else "forward"
        if self._running:
            return Place(_name(op), self._running[-1], phase)
        node: Any = torch._C._current_autograd_node()
        return Place(_name(op), "" if node is None else node.metadata.get(_MODULE, ""), phase)


def _name(op: Op) -> str:
    return str(op.overloadpacket) if op._overloadname == "default" else str(op)


class _Observer(TorchDispatchMode):
    """Counts what the ops of a step would do."""

    def __init__(self, counts: Counts, modules: _Modules, groups: list[str]):
        super().__init__()
        self._counts = counts
        self._modules = modules
        self._groups = groups
        self._before = self._traffic()

    def _traffic(self) -> Counter[str]:
        return sum((Counter(_C.traffic(name)) for name in self._groups), Counter())

    def __torch_dispatch__(self, op: Op, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self._look_for_empty_shards(op, args)
            return NotImplemented  # the rule comes next; what it calls passes here again
        results = op(*args, **(kwargs or {}))
        if op.namespace == "torchtp":
            self._count_exchanges(op)
            self._count_collectives(op, _statistics_bytes(op, args))
        elif op.namespace == "_c10d_functional" and _communicates(op):
            self._count_collectives(op, [leaf.nbytes for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)])
        return results

    def gathering(self, op: Op, shape: torch.Size, dtype: torch.dtype) -> None:
        self._counts.gathers[self._modules.place(op), tuple(shape), dtype] += 1

    def _count_exchanges(self, op: Op) -> None:
        now = self._traffic()
        new, self._before = now - self._before, now
        if new["num_exchanges"]:
            place = self._modules.place(op)
            self._counts.exchanged_bytes[place] += new["num_bytes"]
            self._counts.num_exchanges[place] += new["num_exchanges"]
            self._counts.num_beyond[place] += new["num_beyond_neighbours"]

    def _count_collectives(self, op: Op, each: list[int]) -> None:
        if each:
            place = self._modules.place(op)
            self._counts.collective_bytes[place] += sum(each)
            self._counts.num_collectives[place] += len(each)

    def _look_for_empty_shards(self, op: Op, args: tuple[Any, ...]) -> None:
        for leaf in pytree.tree_leaves(args):
            if not isinstance(leaf, DTensor):
                continue
            for axis, placement in enumerate(spec_of(leaf).placements):
                if not plain_shard(placement):
                    continue
                extent, size = leaf.size(placement.dim), leaf.device_mesh.size(axis)
                num_empty = size - -(-extent // -(-extent // size)) if extent else size
                key = (axis, placement.dim - leaf.dim())
                if num_empty > 0 and key not in self._counts.empty:
                    self._counts.empty[key] = (self._modules.place(op), extent, num_empty)


def _communicates(op: Op) -> bool:
    """Whether it sends something: what names no group (wait_tensor, _wrap_tensor_autograd) does not."""
    return any(argument.name == "group_name" for argument in op._schema.arguments)


def _statistics_bytes(op: Op, args: tuple[Any, ...]) -> list[int]:
    """What a norm hands to a group's small collective, once for each mesh axis: float64 sums, and their count."""
    name = op._schema.name.removeprefix("torchtp::")
    if name not in ("batch_norm", "batch_norm_backward", "group_norm", "group_norm_backward"):
        return []
    named = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=True)}
    if not named.get("training", True) or not named.get("output_mask", [True])[0]:
        return []
    numbers = named["input"].size(1) if "batch" in name else named["input"].size(0) * named["num_groups"]
    return [8 * (2 * numbers + 1) for group in named["cut_groups"] if _resolve_process_group(group).size() > 1]


def without_data(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the module whose tensors have shapes only; it shares no memory with it."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for leaf in pytree.tree_leaves([vars(part), part._parameters, part._buffers]):
            if isinstance(leaf, Tensor) and id(leaf) not in memo:
                if isinstance(leaf, (DTensor, UninitializedTensorMixin)):
                    raise ValueError(
                        f"{type(part).__name__} has a parameter that is a DTensor or not initialized yet: explain the "
                        "module before it is sharded and after its first forward"
                    )
                if isinstance(leaf, nn.Parameter):
                    memo[id(leaf)] = nn.Parameter(_bare(leaf), leaf.requires_grad)
                elif leaf.dim() == 0 and not leaf.is_meta:
                    memo[id(leaf)] = leaf.detach().cpu().clone()  # a counter or a rate that forward may ask for
                else:
                    memo[id(leaf)] = _bare(leaf)
    copied = copy.deepcopy(module, memo)
    return copied if dtype is None else copied.to(dtype)


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def rehearse(
    module: nn.Module,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    axes: Mapping[str, int],
    dims: Mapping[str, int],
    coordinates: Sequence[int],
) -> Counts:
    """Count one forward and backward of `module` (which is `without_data`, and used up) on images of these shapes.

    For the rank at `coordinates` of a mesh of `axes` that cut `dims`; without axes for a single device.
    """
    counts = Counts()
    lazy.prepare(module)
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            classes.become(part, _alone_norm(cast(Any, type(part))))
    modules = _Modules(module)
    images = [torch.empty(tuple(shape), dtype=dtype, device=_META) for shape in shapes]
    parameters = [parameter.detach() for parameter in module.parameters()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone)
        stack.enter_context(_unchanged())
        stack.enter_context(_META)
        inputs = images
        if axes:
            mesh = _mesh(tuple(axes), tuple(axes.values()), tuple(coordinates))
            mark(mesh, range(mesh.ndim))
            observer = _Observer(counts, modules, stack.enter_context(mesh.registered()))
            inputs = [_cut(image, mesh, dims) for image in images]
            stack.enter_context(notice.told_to(observer.gathering))
            # Not on a single device: where a mode is active, some ops take another way and keep something else.
            stack.enter_context(observer)
        locals_ = [image._local_tensor if isinstance(image, DTensor) else image for image in inputs]
        with (
            SavedBytes([*parameters, *locals_]) as saved,
            lazy.given_back_buffers(module.modules()) as buffers,
            running() if axes else contextlib.nullcontext(),
        ):
            outputs = module(*inputs)
        if axes:
            outputs = pytree.tree_map_only(DTensor, lambda leaf: _given(leaf, mesh, dims, shapes), outputs)
        counts.kept_bytes = saved.num_bytes
        lazy.settle_buffers(buffers)
        _backward(lazy.unwrap(outputs))
    return counts


class _AloneNorm(nn.SyncBatchNorm, classes.Remade):
    """Of the images there are: SyncBatchNorm itself asks for a device where the caller has process groups."""

    __slots__ = ()
    forward = nn.modules.batchnorm._BatchNorm.forward


@remembered
def _alone_norm(base: type[nn.SyncBatchNorm]) -> type:
    return classes.remade(base, (_AloneNorm,), {}, _alone_norm)


def _cut(image: Tensor, mesh: DeviceMesh, dims: Mapping[str, int]) -> DTensor:
    placements = tuple(Shard(dim + image.dim()) for dim in dims.values())
    return wrap(cut_locally(image, mesh, placements).clone(), mesh, placements, image.shape)


def _given(leaf: DTensor, mesh: DeviceMesh, dims: Mapping[str, int], shapes: Sequence[Sequence[int]]) -> DTensor:
    """An output as `parallelize` gives it: what looks like an image is cut as the images are."""
    cut = [dim + leaf.dim() for dim in dims.values()]
    if leaf.device_mesh != mesh or min(cut) <= 0:
        return leaf
    return cut_as_images(leaf, [Shard(dim) for dim in cut], shapes)


def _backward(outputs: Any) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """The caller's random numbers, warnings and modes stay as they are."""
    states = [(generator, generator.state()) for generator in outside_torch()]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(False)  # on the meta device bilinear would be taken apart for it
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
            for generator, state in states:
                generator.restore(state)
