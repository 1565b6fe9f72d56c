"""LSTM, GRU and plain recurrent layers over cut sequences: each rank has whole sequences of some of the batch meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, axes_of, full_of, sums_done
from torchtp.dtensor.moving import Recut
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, composite_rule, spatial_rule
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.sharing import hand_out, local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Placement,
    Replicate,
    Shard,
    plain_shard,
    spec_of,
    taken_apart,
)
from torchtp.dtensor.wrapping import Function, on_mesh, parameter_gradient, wrap


@dataclass(frozen=True)
class _Plan:
    """A call: how its sequences and its states are cut, and what it is given beside tensors."""

    op: Op
    mesh: DeviceMesh
    batch: int  # the dim of the sequences that is their number
    sequences: Placements
    states: Placements
    num_states: int
    is_lstm: bool  # whose states are a list
    options: tuple[Any, ...]
    as_called: Callable[[], AbstractContextManager[Any]]  # under the caller's autocast: backward runs the op again

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Those of the op, of a sequence, its states and parameters in a row."""
        states, parameters = tensors[1 : 1 + self.num_states], tensors[1 + self.num_states :]
        return tensors[0], states if self.is_lstm else states[0], parameters, *self.options

    def results(self, parts: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
        """Of this rank's parts of `number` sequences: where they are none of one of zeros, for of none it may have another dtype."""
        dims = [self.batch, *[1] * self.num_states]
        is_made_up = number > 0 and parts[0].size(self.batch) == 0
        if is_made_up:
            made_up = [_with_one(part, dim) for part, dim in zip(parts, dims, strict=False)]
            parts = [*made_up, *parts[len(made_up) :]]
        with self.as_called():
            results = self.op(*self.arguments(parts))
        if is_made_up:
            results = [result.narrow(dim, 0, 0) for result, dim in zip(results, dims, strict=True)]
        return list(results)

    @property
    def placements(self) -> list[Placements]:
        """Of the sequence and its states, in and out."""
        return [self.sequences, *[self.states] * self.num_states]

    def parts(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """What this rank computes with."""
        local = [local_as(t, self.mesh, p) for t, p in zip(tensors, self.placements, strict=False)]
        return local + [
            local_as(t, self.mesh, (Replicate(),) * self.mesh.ndim) if isinstance(t, DTensor) else t
            for t in tensors[1 + self.num_states :]
        ]


class Recurrent(Function):
    """Keeps what it was given, and runs once more in backward: nothing of the steps is kept."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: torch.Tensor) -> tuple[DTensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.plan = plan
        whole, num = tensors[0].shape, tensors[0].size(plan.batch)
        output, *states = plan.results(plan.parts(tensors), num)
        shape = torch.Size([*whole[:2], output.size(-1)])
        return (
            wrap(output, plan.mesh, plan.sequences, shape),
            *(wrap(state, plan.mesh, plan.states, torch.Size([state.size(0), num, state.size(2)])) for state in states),
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        plan, tensors = ctx.plan, ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *_derivable(plan, tensors, grads, ctx.needs_input_grad[1:])
        parts = [part.detach().requires_grad_() for part in plan.parts(tensors)]
        with torch.enable_grad():
            results = plan.results(parts, tensors[0].size(plan.batch))
        given = [local_as(grad, plan.mesh, place) for grad, place in zip(grads, plan.placements, strict=True)]
        of_parts = torch.autograd.grad(results, parts, given)
        cut = [
            wrap(grad, plan.mesh, place, tensor.shape, made_of=[tensor])
            for grad, place, tensor in zip(of_parts, plan.placements, tensors, strict=False)
        ]
        own = zip(of_parts[len(cut) :], tensors[len(cut) :], strict=True)
        return None, *cut, *(parameter_gradient(grad, tensor, plan.mesh, plan.sequences) for grad, tensor in own)


def _derivable(plan: _Plan, tensors: tuple[Any, ...], grads: tuple[Any, ...], needed: tuple[bool, ...]) -> list[Any]:
    """The gradients made of ops that can be derived again."""
    tensors = tuple(map(torch.ops.aten.alias, tensors))
    wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
    with plan.as_called():
        results = taken_apart(plan.op, plan.arguments(tensors), {})
    found = iter(torch.autograd.grad(results, wanted, [on_mesh(grad, plan.mesh) for grad in grads], create_graph=True))
    return [next(found) if needs else None for needs in needed]


def _with_one(part: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1 if d == dim else extent for d, extent in enumerate(part.shape)]
    return torch.cat([part, part.new_zeros(shape)], dim)


def _autocast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """That of now, to enter again; casts of parameters, which have no derivatives here, are not kept for other ops to find."""
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)


def _of_batch(op: Op, input: DTensor, batch: int) -> Placements:
    """The cut with which sequences are whole: of the batch, if it is large enough; else none, with notice."""
    sizes = axes_of(input.device_mesh).sizes
    placements: list[Placement] = list(sums_done(spec_of(input).placements))
    pieces = 1
    for axis, place in enumerate(placements):
        if plain_shard(place) and place.dim == batch:
            pieces *= sizes[axis]
    for axis, place in enumerate(placements):
        if not plain_shard(place) or place.dim == batch:
            continue
        if input.size(batch) >= pieces * sizes[axis]:
            placements[axis] = Shard(batch)
            pieces *= sizes[axis]
        else:
            notice.gathering(op, input.shape, input.dtype)
            placements[axis] = Replicate()
    return tuple(placements)


def _recurrent(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, states, parameters, *options = bound(op, args, kwargs)
    is_lstm = isinstance(states, (list, tuple))
    states = list(states) if is_lstm else [states]
    _, _, dropout, train, _, batch_first = options
    if not is_spatial(input) or has_strided_shard(input) or input.dim() != 3 or (dropout and train):
        return taken_apart(op, args, kwargs)
    for state in states:
        if not isinstance(state, DTensor):
            hand_out(state)  # each rank takes its part of it
    batch = 0 if batch_first else 1
    sequences = _of_batch(op, input, batch)
    of_states = tuple(Shard(1) if plain_shard(place) else place for place in sequences)
    as_called = _autocast(input.device.type)
    plan = _Plan(op, input.device_mesh, batch, sequences, of_states, len(states), is_lstm, tuple(options), as_called)
    return Recurrent.apply(plan, Recut.apply(input, sequences), *states, *parameters)


for _name in ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"):
    composite_rule(_name)(takes_nested(_recurrent))


@spatial_rule("_pack_padded_sequence")
def _packed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many sequences go on at each step is the same on all ranks, and plain: it is read where it lies in memory."""
    data, num_going_on = unruled(op, args, kwargs)
    return data, full_of(num_going_on)


def _of_packed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data, num_going_on, *others = args  # beside what is cut that became a DTensor again
    return taken_apart(op, (data, full_of(num_going_on), *others), kwargs)


for _name in ("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", "_pad_packed_sequence"):
    composite_rule(_name)(_of_packed)
