"""`DistributedOptimizer`, and models and optimizers that start alike."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from torchtp import gradients
from torchtp.faults import agreed, fault_of
from torchtp.horovod.absent import ABSENT
from torchtp.horovod.common import Compression, check_started
from torchtp.horovod.reductions import Average, Sum

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite a state_dict's or named tensors by those of `root_rank`; see `torchtp.gradients.broadcast_parameters`."""
    check_started("broadcast_parameters")
    gradients.broadcast_parameters(params, root=root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Overwrite an optimizer's state and hyperparameters by those of `root_rank`; TypeError for what is no optimizer."""
    check_started("broadcast_optimizer_state")
    gradients.broadcast_optimizer_state(optimizer, root=root_rank)


class _Distributed:
    """Mixed into the class of an optimizer that `DistributedOptimizer` was called on."""

    _reducer: gradients.GradientReducer
    _backward_passes_per_step: int
    _num_passes: int | None  # of the reducer, at the last step; None where a step is not to ask

    def synchronize(self) -> None:
        """Reduce gradients that were accumulated since the last reduction, or, if there was none since the last step, what they are.

        Those that a script has set itself, or of a rank whose loss has not reached them. Collective.
        """
        if self._reducer.num_unreduced or self._reducer.num_passes == self._num_passes:
            self._reducer.reduce()

    def _settle(self) -> None:
        self.synchronize()
        self._num_passes = self._reducer.num_passes

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts that call `synchronize` before `step`, which does nothing twice anyway, or reduce gradients themselves."""
        self._num_passes = None
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on every `passes`-th backward reduces; alike on all ranks."""
        self._backward_passes_per_step = passes
        self._reducer.reduce_every(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: gradients of parameters that come later would stay this rank's own."""
        raise ValueError(
            "add_param_group: the parameters of a distributed optimizer are those it had when DistributedOptimizer was called: "
            "add all groups before, or make an optimizer of its own for the new ones"
        )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's; the next backward is the first of a step, whatever has been before (a batch given up, another model's loss)."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        if self._reducer.num_unreduced:
            self._reducer.reduce_every(self._backward_passes_per_step)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """The optimizer's step, on what `synchronize` leaves, each time after a closure as well."""
        return self._synchronized(super().step, closure)  # type: ignore[misc]

    # The optimizer's own step runs its hooks: `load_state_dict` would have them run around this one, too.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronized(self, step: Callable[..., Any], closure: Callable[[], float] | None = None) -> Any:
        if closure is None:
            self._settle()
            return step()

        def synchronized() -> float:
            loss = closure()
            self._settle()
            return loss

        return step(synchronized)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what is pickled, has parameters of its own: it is the optimizer as it was before."""
        return _plain, (type(self).__mro__[2],), self.__getstate__()  # type: ignore[attr-defined]


def _plain(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Optimizer:
    """Make gradients of the optimizer's parameters global in every `backward_passes_per_step`-th backward; the optimizer is changed in place and returned.

    `gradient_predivide_factor`, `num_groups` and `groups` change nothing: sums of 16-bit gradients are taken in fp32, and buckets are made by size.

    Raises ValueError on every rank if the ranks' parameters differ, for an `op` that is not Average or Sum, an optimizer that is distributed
    already, `named_parameters` that leave out one of the optimizer's or have a name twice, a factor that is not positive, `sparse_as_dense` and a
    `process_set`; TypeError for what is no optimizer.
    """
    check_started("DistributedOptimizer")
    named: list[tuple[str, torch.Tensor]] = []

    def check() -> None:
        named.extend(_checked(optimizer, named_parameters, backward_passes_per_step, op))
        _check_options(op, gradient_predivide_factor, sparse_as_dense, process_set)

    fault = fault_of(check)
    passes = agreed(fault, backward_passes_per_step)
    for rank, theirs in enumerate(passes):
        if theirs != passes[0]:
            raise ValueError(
                f"DistributedOptimizer: backward_passes_per_step is the same on all ranks, but it is {passes[0]} on rank 0 "
                f"and {theirs} on rank {rank}"
            )
    reducer = gradients.GradientReducer(named, compression=compression, average=op == Average)
    reducer.reduce_every(backward_passes_per_step)
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {})
    optimizer._reducer = reducer  # type: ignore[attr-defined]
    optimizer._backward_passes_per_step = backward_passes_per_step  # type: ignore[attr-defined]
    optimizer._num_passes = 0  # type: ignore[attr-defined]
    if step := vars(optimizer).get("step"):  # of a scheduler that was made before: it calls the plain optimizer's
        synchronized = functools.partial(_Distributed._synchronized, weakref.proxy(optimizer), step)
        optimizer.step = functools.update_wrapper(synchronized, step)  # type: ignore[method-assign]
    return optimizer


def _check_options(op: str, gradient_predivide_factor: float, sparse_as_dense: bool, process_set: Any) -> None:
    is_number = isinstance(gradient_predivide_factor, (int, float))
    if not is_number or not gradient_predivide_factor > 0 or (gradient_predivide_factor != 1 and op != Average):
        raise ValueError(
            "DistributedOptimizer: gradient_predivide_factor is positive, and not 1 only with op Average, but it is "
            f"{gradient_predivide_factor!r} with {op}"
        )
    if sparse_as_dense:
        raise ValueError(
            "DistributedOptimizer: sparse gradients are not reduced: leave sparse_as_dense out and use nn.Embedding(sparse=False)"
        )
    if process_set is not None:
        raise ValueError(
            f"DistributedOptimizer has no process_set: {ABSENT['ProcessSet']}, and GradientReducer's group"
        )


def _checked(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    backward_passes_per_step: int,
    op: str,
) -> list[tuple[str, torch.Tensor]]:
    """(name, parameter) of all that the optimizer steps."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer takes a torch.optim.Optimizer, but it is a {type(optimizer).__name__}")
    if op not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer: op is Average or Sum, but it is {op!r}")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(
            "DistributedOptimizer: at least every 1st backward reduces, but the interval is "
            f"{backward_passes_per_step!r}: give backward_passes_per_step from 1 on"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"parameter {index}", parameter) for index, parameter in enumerate(every)]
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "DistributedOptimizer: named_parameters are (name, parameter), as model.named_parameters() gives"
        )
    twice = [name for name, times in Counter(name for name, _ in named).items() if times > 1]
    if twice:
        raise ValueError(
            f"DistributedOptimizer: a name in named_parameters is one parameter's, but {', '.join(map(repr, twice))} stands "
            "there more than once: put a prefix before the names of each model"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [parameter for parameter in every if id(parameter) not in known]
    if unnamed:
        raise ValueError(
            f"DistributedOptimizer: named_parameters name all that the optimizer steps, but {len(unnamed)} of {len(every)} "
            f"have no name, the first of shape {tuple(unnamed[0].shape)}: pass model.named_parameters() of every model, or None"
        )
    stepped = {id(parameter) for parameter in every}
    return [(name, parameter) for name, parameter in named if id(parameter) in stepped]
