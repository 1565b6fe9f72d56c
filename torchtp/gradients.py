"""Gradients that are global when `backward()` returns: one bucketed allreduce, under way while backward still runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchtp import _C
from torchtp.dtensor.outside import are_averaged
from torchtp.dtensor.sharing import share_gradient
from torchtp.faults import agreed, fault_of
from torchtp.steps_in_backward import step_after_reduction

_MIB = 1 << 20


@dataclass(frozen=True)
class Statistics:
    """What a reducer observed; the times only while `GradientReducer.record` is on.

    `communication_seconds`: at least one bucket was under way; `hidden_seconds`: of these, while backward still ran.
    """

    num_backwards: int
    num_buckets: int
    num_bytes: int
    communication_seconds: float
    hidden_seconds: float

    @property
    def hidden_fraction(self) -> float:
        """Part of the communication that backward hid; 0 where nothing was measured."""
        return self.hidden_seconds / self.communication_seconds if self.communication_seconds else 0.0


def complaint_of_options(bucket_bytes: int, compression: str) -> str:
    """What is wrong with options of a reducer whose parameters are not known yet; empty if nothing is. Local."""
    stand_in = torch.nn.Parameter(torch.empty(0))
    fault = fault_of(lambda: _C.Reducer.check([stand_in], [""], bucket_bytes, 0, compression, True, "auto"))
    return "" if fault is None else str(fault)


class GradientReducer:
    """Makes `p.grad` of every parameter its mean over the ranks of `group` by the time `backward()` returns.

    `parameters` is a module, or an iterable of parameters or of (name, parameter); every parameter is a plain dense
    leaf of any shape, dtype and strides; frozen ones are left alone as long as they are, on all ranks alike. All ranks pass
    the same ones in the same order.
    From the second backward on `p.grad` is a view of a bucket of at least `bucket_bytes` (the first bucket:
    `first_bucket_bytes`); on the backend torchtp the bucket lies in memory that all ranks share. `compression`
    ("none", "fp16", "bf16") is what fp32 and fp64 gradients travel as. With `average=False` the sum is taken instead of
    the mean; then gradients must be zeroed between two backwards. `packing` is how gradients get into a bucket: "each" by
    a copy when it is there, or all "together" by one launch when the last one is; "auto" does so on CUDA (on the CPU
    "together" is for tests: right and slow). Buckets of CUDA gradients are packed, reduced and unpacked on a stream of
    their own; the stream on which `backward()` was called waits for it.

    Whatever a rank holds in `p.grad` takes part: gradients accumulated under `no_sync`, or on top of already reduced
    ones; a parameter without gradient on some ranks counts as zero there, and keeps `grad` None if it has none anywhere.

    Post-accumulate hooks of parameters run at the end of a backward that reduces, on the mean; `Tensor.register_hook`'s as
    well once an output has been watched (`watch`), else on what this rank adds.

    Raises ValueError on every rank if the ranks' parameters or options differ, there are none or one is no leaf, TypeError on
    every rank for a DTensor, a sparse parameter or what is none. `backward()` raises if a gradient cannot be reduced or if the
    backward of another rank raised.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 25 * _MIB,
        first_bucket_bytes: int = _MIB,
        compression: str = "none",
        average: bool = True,
        packing: str = "auto",
    ):
        self.group = group if group is not None else dist.group.WORLD
        if self.group is None:
            raise ValueError("gradients: there is no process group; call init_process_group first or pass `group`")
        if not isinstance(self.group, dist.ProcessGroup):
            raise ValueError(
                f"gradients: a GradientReducer is made by the ranks of its group, and rank {dist.get_rank()} is none of them"
            )
        named: list[tuple[str, torch.Tensor]] = []
        bytes_and_ways = bucket_bytes, first_bucket_bytes, compression, average, packing

        def check() -> None:
            named.extend(_named(parameters))
            _C.Reducer.check([one for _, one in named], [name for name, _ in named], *bytes_and_ways)

        agreed(fault_of(check), group=self.group)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._reducer = _C.Reducer(
            self.parameters,
            self.names,
            self.group.group_name,
            *bytes_and_ways,
            share_gradient,
        )
        are_averaged(self.parameters, self)
        step_after_reduction(self.parameters)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside it leaves gradients this rank's own; the next one outside reduces what has accumulated."""
        before, self._reducer.sync = self._reducer.sync, False
        try:
            yield
        finally:
            self._reducer.sync = before

    @property
    def syncs(self) -> bool:
        """False inside `no_sync`."""
        return self._reducer.sync

    @property
    def frozen(self) -> list[list[str]]:
        """Names of the parameters that are not trained now: runs of those that follow one another."""
        named = zip(self.names, self.parameters, strict=True)
        runs = itertools.groupby(named, lambda one: one[1].requires_grad)
        return [[name for name, _ in run] for is_trained, run in runs if not is_trained]

    def reduce_every(self, num_backwards: int) -> None:
        """Only every n-th backward reduces from now on; those between accumulate, as under `no_sync`."""
        self._reducer.set_interval(num_backwards)

    @property
    def num_unreduced(self) -> int:
        """Backwards since the last one that reduced, after `reduce_every(n)` with n > 1."""
        return self._reducer.num_unreduced

    @property
    def num_passes(self) -> int:
        """How often gradients were reduced until now, in vain where a backward raised."""
        return self._reducer.num_passes

    def reduce(self) -> None:
        """Reduce what gradients hold now, outside backward. Collective: every rank calls it."""
        self._reducer.reduce()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their 2-norm is at most `max_norm`; returns the norm they had, a scalar on their device.

        As `torch.nn.utils.clip_grad_norm_` on the reducer's parameters, but a launch or two for each bucket where CUDA
        gradients lie in their buckets. A norm that is not finite tells that some gradient is not. Not collective: where
        gradients are reduced, the ranks have the same ones. Raises ValueError for a `max_norm` that is negative or no number.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_grad_norm_: max_norm is not negative, but it is {max_norm}")
        norm = self._reducer.clip_norm(max_norm)
        return norm if norm is not None else torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def prepare(self) -> None:
        """Call before forward where backward may have failed, or parameters have got another dtype or device, on all ranks alike.

        Waits for what a failed backward left under way. PyTorch gives a parameter that is cast another accumulator of
        gradients, of which the reducer hears from here on: without this call its gradient may stay this rank's own.
        """
        if not self.num_passes:
            step_after_reduction(self.parameters)  # of optimizers made since
        self._reducer.prepare()

    def watch(self, output: torch.Tensor) -> None:
        """Make a backward through `output` reduce even on a rank where it reaches no parameter."""
        self._reducer.watch(output)

    def record(self, on: bool = True) -> None:
        """Measure times and keep the events of the last backward from now on, or stop to."""
        self._reducer.record(on)

    @property
    def statistics(self) -> Statistics:
        """What was observed since the reducer was made, or since `reset_statistics`."""
        return Statistics(**self._reducer.statistics())  # type: ignore[arg-type]

    def reset_statistics(self) -> None:
        """Begin counting anew."""
        self._reducer.reset_statistics()

    @property
    def events(self) -> list[tuple[str, int]]:
        """The last backward while recording: ("ready", parameter), ("start" or "done", bucket), ("end_of_backward", 0)."""
        return self._reducer.events()

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters of each bucket, in the order in which buckets leave; empty before the first backward."""
        return self._reducer.bucket_names()

    def holds(self, name: str) -> bool:
        """Whether the gradient of that parameter lies in its bucket; ValueError if none has the name."""
        if name not in self.names:
            known = ", ".join(map(repr, self.names[:3])) + (", ..." if len(self.names) > 3 else "")
            raise ValueError(f"holds: {name!r} is no parameter of this reducer, whose names are {known}")
        return self._reducer.holds_gradient(self.names.index(name))


def _named(parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, parameter) of every parameter, tied ones once."""
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    if not isinstance(parameters, Iterable):
        raise TypeError(
            f"gradients: parameters are a module, parameters or (name, parameter), not a {type(parameters).__name__}"
        )
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for index, item in enumerate(parameters):
        name, parameter = item if isinstance(item, tuple) and len(item) == 2 else (f"parameter {index}", item)
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"gradients: parameters are tensors or (name, tensor), but number {index} is a {type(item).__name__}, {item!r}: "
                "pass a module, module.parameters() or module.named_parameters()"
            )
        named.setdefault(id(parameter), (name, parameter))
    return list(named.values())


def broadcast_parameters(
    source: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
    root: int = 0,
) -> None:
    """Overwrite the tensors of a module (parameters and buffers), a state_dict or named tensors by those of rank `root` of `group`.

    Tensors of the same dtype and device travel together. Raises ValueError on every rank if shapes or dtypes differ or `root` is
    no rank, TypeError on every rank where something is no dense tensor with data, as in an optimizer's state_dict.
    """
    if isinstance(source, torch.nn.Module):
        items: Iterable[Any] = [*source.named_parameters(), *source.named_buffers()]
    elif isinstance(source, Mapping):
        items = source.items()
    else:
        items = source if isinstance(source, Iterable) else [("it", source)]
    named: list[tuple[str, Any]] = [
        item if isinstance(item, tuple) and len(item) == 2 else (f"parameter {index}", item)
        for index, item in enumerate(items)
    ]
    facts = [
        (name, tuple(value.shape), str(value.dtype))
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
        else (name, None, _kind_of(value))
        for name, value in named
    ]
    gathered = agreed(fault_of(lambda: _check_root("broadcast_parameters", root, group)), (root, facts), group)
    for rank, (_, theirs) in enumerate(gathered):
        _refuse_others(rank, theirs)
    _check_same([[("root", of_rank), *theirs] for of_rank, theirs in gathered], "broadcast_parameters", "tensors")
    _broadcast([value for _, value in named], group, root)


def _check_root(caller: str, root: int, group: dist.ProcessGroup | None) -> None:
    if not isinstance(root, int) or not 0 <= root < dist.get_world_size(group):
        raise ValueError(f"{caller}: root is one of 0 to {dist.get_world_size(group) - 1}, but it is {root!r}")


def _kind_of(value: Any) -> str:
    of = f" of layout {value.layout} on {value.device}" if isinstance(value, torch.Tensor) else ""
    return type(value).__name__ + of


def _refuse_others(rank: int, facts: list[tuple[str, Any, str]]) -> None:
    for name, shape, kind in facts:
        if shape is None:
            raise TypeError(
                f"broadcast_parameters takes dense tensors that have data, but {name!r} of rank {rank} is a {kind}: pass "
                "an optimizer to broadcast_optimizer_state, other objects to torch.distributed.broadcast_object_list"
            )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None, root: int = 0
) -> None:
    """Overwrite an optimizer's state and hyperparameters by those of rank `root` of `group`, also where it has none yet.

    Raises TypeError on every rank for what is no optimizer, ValueError where the root is no rank, ranks differ in it or in groups, or
    a rank's optimizer does not load the state.
    """

    facts: list[Any] = [("root", root)]

    def check() -> None:
        _check_root("broadcast_optimizer_state", root, group)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"broadcast_optimizer_state takes a torch.optim.Optimizer, but it is a {type(optimizer).__name__}: pass the "
                "optimizer itself, and a model's state_dict to broadcast_parameters"
            )
        facts.append(("optimizer", type(optimizer).__name__))
        facts.extend((f"parameters of group {i}", len(g["params"])) for i, g in enumerate(optimizer.param_groups))

    _check_same(agreed(fault_of(check), facts, group), "broadcast_optimizer_state", "root and groups of parameters")
    state = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    if dist.get_rank(group) == root:
        skeleton = [_without_tensors(state, tensors)]
    else:
        skeleton = [None]
    dist.broadcast_object_list(skeleton, group=group, group_src=root)
    if dist.get_rank(group) != root:
        devices = [p.device for g in optimizer.param_groups for p in g["params"]]
        state = _with_tensors(skeleton[0], tensors, devices[0] if devices else torch.device("cpu"))
    _broadcast(tensors, group, root)

    def load() -> None:
        if dist.get_rank(group) != root:
            optimizer.load_state_dict(state)
            _restore_dtypes(optimizer, state)

    agreed(fault_of(load), group=group)


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give tensors of its state the root's dtypes: `load_state_dict` makes those of the parameters of them."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    indices = [index for g in state["param_groups"] for index in g["params"]]
    for parameter, index in zip(parameters, indices, strict=True):
        own = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(index, {}).items():
            loaded = own.get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                own[name] = value.to(loaded.device)


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor in a state that travels as an object."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _without_tensors(state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor) and state.dim() > 0:  # counters travel as objects
        tensors.append(state)
        return _Hole(tuple(state.shape), tuple(state.stride()), state.dtype, state.device.type == "cpu")
    if isinstance(state, dict):
        return {key: _without_tensors(value, tensors) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_without_tensors(value, tensors) for value in state)
    return state


def _with_tensors(state: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    if isinstance(state, _Hole):
        place = torch.device("cpu") if state.on_cpu else device
        tensors.append(torch.empty_strided(state.shape, state.stride, dtype=state.dtype, device=place))
        return tensors[-1]
    if isinstance(state, dict):
        return {key: _with_tensors(value, tensors, device) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_with_tensors(value, tensors, device) for value in state)
    return state


def _check_same(gathered: list[Any], caller: str, what: str) -> None:
    """Raise ValueError where a rank has another list than the first one."""
    for rank, theirs in enumerate(gathered):
        if theirs == gathered[0]:
            continue
        first, other = next(
            ((a, b) for a, b in zip(gathered[0], theirs, strict=False) if a != b), (len(gathered[0]), len(theirs))
        )
        raise ValueError(
            f"{caller}: all ranks must pass the same {what}, but rank 0 has {first} where rank {rank} has {other}; "
            "build the same model on every rank"
        )


@torch.no_grad()
def _broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup | None, root: int) -> None:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
        dist.broadcast(flat, group=group, group_src=root)
        for tensor, piece in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(piece.view(tensor.shape))
