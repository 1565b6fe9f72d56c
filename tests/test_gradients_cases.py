"""Gradients that come in unusual ways: compressed, mixed, with a graph, checkpointed, after an exception, unequal."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from models import Fault
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtp.gradients import GradientReducer, broadcast_optimizer_state, broadcast_parameters
from torchtp.testing import RanksFailed, run_ranks

SMALL = {"bucket_bytes": 200, "first_bucket_bytes": 60}


def _chain(dtype=torch.float64, width=6):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)).to(
        dtype
    )


def _input(rank, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


def _flat(tensors):
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def _gradient(model):
    return _flat(p.grad for p in model.parameters())


def _reference(make_loss, dtype=torch.float64):
    """The gradient of the mean of all ranks' losses, in one process."""
    model = _chain(dtype)
    torch.stack([make_loss(model, rank) for rank in range(dist.get_world_size())]).mean().backward()
    return _gradient(model)


def _error(got, wanted):
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def _square(model, rank):
    return model(_input(rank)).square().sum()


def _compressed(compression, average, scale):
    model = _chain(torch.float32)
    reducer = GradientReducer(model, compression=compression, average=average, **SMALL)
    wanted = _reference(_square) * (1 if average else dist.get_world_size())
    for _ in range(2):
        reducer.reset_statistics()
        model.zero_grad()
        (model(_input(dist.get_rank(), torch.float32)).square().sum() * scale).backward()
    num_bytes = sum(p.numel() for p in model.parameters()) * 4
    return _error(_gradient(model) / scale, wanted), reducer.statistics.num_bytes / num_bytes


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-5), ("fp16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("average", [True, False])
def test_compressed_gradients_are_near_and_travel_in_half_the_bytes(backend, compression, tolerance, average):
    for error, share in run_ranks(_compressed, 2, compression, average, 1.0, backend=backend):
        assert (error > 0 or compression == "none") and error < tolerance
        # Marks and cache lines come on top.
        assert share < 2.0 if compression == "none" else share < 1.0


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_sums_of_fp16_do_not_overflow_where_the_mean_does_not(backend):
    # The largest gradients are near fp16's 65504: their sum is beyond it.
    (error, _), _ = run_ranks(_compressed, 2, "fp16", True, 4000.0, backend=backend)
    assert error < 2e-3


def _scaler_with_an_inf():
    rank = dist.get_rank()
    model = _chain(torch.float32)
    reducer = GradientReducer(model, compression="fp16", **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = []
    for bad in (False, True, False):
        before = _flat(model.parameters())
        optimizer.zero_grad()
        loss = model(_input(rank, torch.float32)).square().sum()
        if bad and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append(not before.equal(_flat(model.parameters())))
    assert reducer.statistics.num_backwards == 3
    return steps, scaler.get_scale(), _flat(model.parameters()).tolist()


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_an_inf_on_one_rank_makes_all_skip_the_step(backend):
    first, second = run_ranks(_scaler_with_an_inf, 2, backend=backend)
    assert first == second
    assert first[:2] == ([True, False, True], 4.0)


class _Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(5, dtype=torch.float32))
        self.b = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
        self.d = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.e = nn.Parameter(torch.ones(7, dtype=torch.float16))
        self.f = nn.Parameter(torch.ones(0))
        self.g = nn.Parameter(torch.ones(3, dtype=torch.float32).expand(2, 3))

    def forward(self, value):
        real = self.a.sum() + self.b.float().sum() + self.d.float() + self.e.float().sum() + self.f.sum() + self.g.sum()
        return value * (real + (self.c * (1 + 2j)).abs().square().sum())


def _mixed():
    model = _Mixed()
    reducer = GradientReducer(model, **SMALL)
    for _ in range(2):
        model.zero_grad()
        model(dist.get_rank() + 1.0).backward()
    return {name: p.grad for name, p in model.named_parameters()}, reducer.buckets


def test_every_dtype_travels_in_a_bucket_of_its_own():
    for grads, buckets in run_ranks(_mixed, 2, backend="torchtp"):
        for name in "abdefg":
            assert grads[name].double().sub(1.5).abs().sum() == 0, name
        torch.testing.assert_close(grads["c"], torch.full((2, 2), 15 + 0j))
        kinds = {"a": 0, "c": 0, "f": 0, "g": 0, "b": 1, "d": 2, "e": 3}
        assert all(len({kinds[name] for name in names}) == 1 for names in buckets)


def _penalty(model, rank):
    """A loss with a gradient penalty through input gradients."""
    x = _input(rank).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return grad.square().sum() + model(x).sum()


def _double_backward():
    rank = dist.get_rank()
    model = _chain()
    reducer = GradientReducer(model, **SMALL)
    errors = []
    for _ in range(2):
        model.zero_grad()
        x = _input(rank).requires_grad_()
        output = model(x)
        reducer.watch(output)
        before = reducer.statistics.num_backwards
        (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        assert reducer.statistics.num_backwards == before
        (grad.square().sum() + model(x).sum()).backward()
        errors.append(_error(_gradient(model), _reference(_penalty)))
        # Through gradients of parameters: the loss is a function of the global gradient, the same on all ranks.
        model.zero_grad()
        _square(model, rank).backward(create_graph=True)
        first = [p.grad for p in model.parameters()]
        errors.append(_error(_flat(first), _reference(_square)))
        model.zero_grad()
        sum(g.pow(3).sum() for g in first).backward()
        errors.append(_error(_gradient(model), _reference_through_parameters()))
    return errors


def _reference_through_parameters():
    model = _chain()
    loss = torch.stack([_square(model, rank) for rank in range(dist.get_world_size())]).mean()
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return _flat(
        g if g is not None else torch.zeros_like(p)
        for g, p in zip(
            torch.autograd.grad(sum(g.pow(3).sum() for g in first), list(model.parameters()), allow_unused=True),
            model.parameters(),
            strict=True,
        )
    )


@pytest.mark.parametrize("size", [2, 3])
def test_double_backward_is_exact(size):
    for errors in run_ranks(_double_backward, size, backend="torchtp"):
        assert all(error < 1e-12 for error in errors)


def _checkpointed(use_reentrant, watched):
    rank = dist.get_rank()
    model = _chain()
    reducer = GradientReducer(model, **SMALL)
    for _ in range(2):
        model.zero_grad()
        x = _input(rank).requires_grad_()
        y = checkpoint(model[:2], x, use_reentrant=use_reentrant)
        y = checkpoint(model[2:], y, use_reentrant=use_reentrant)
        if watched:
            reducer.watch(y)
        y.square().sum().backward()
    return _error(_gradient(model), _reference(_square)), reducer.statistics.num_backwards


@pytest.mark.parametrize(("use_reentrant", "watched", "num"), [(False, False, 2), (True, True, 2), (True, False, 4)])
def test_checkpointing(use_reentrant, watched, num):
    for error, num_backwards in run_ranks(_checkpointed, 2, use_reentrant, watched, backend="torchtp"):
        assert error < 1e-12
        assert num_backwards == num


def _freeze_and_thaw():
    rank = dist.get_rank()
    model = _chain()
    model[0].requires_grad_(False)
    reducer = GradientReducer(model, **SMALL)
    errors, travelling = [], []
    for frozen in ([0], [0], [], [2], [2], [0, 2, 4], []):
        for index in (0, 2, 4):
            model[index].requires_grad_(index not in frozen)
        reducer.prepare()
        model.zero_grad()
        x = _input(rank).requires_grad_()
        output = model(x)
        reducer.watch(output)
        output.square().sum().backward()
        wanted = _reference(_square).split([p.numel() for p in model.parameters()])
        for p, gradient in zip(model.parameters(), wanted, strict=True):
            assert (p.grad is None) == (not p.requires_grad)
            if p.grad is not None:
                errors.append(_error(_flat([p.grad]), gradient))
        travelling.append(sorted({name.split(".")[0] for names in reducer.buckets for name in names}))
    return torch.tensor(errors).max().item(), travelling


def test_parameters_are_frozen_and_thawed_while_training():
    for error, travelling in run_ranks(_freeze_and_thaw, 2, backend="torchtp"):
        assert error < 1e-12
        assert travelling == [["2", "4"], ["2", "4"], ["0", "2", "4"], ["0", "4"], ["0", "4"], [], ["0", "2", "4"]]


def _fail_in_backward(failing, at_step):
    rank = dist.get_rank()
    model = _chain()
    reducer = GradientReducer(model, **SMALL)
    outcomes = []
    for step in range(4):
        reducer.prepare()
        model.zero_grad(set_to_none=step % 2 == 0)
        try:
            y = model[:2](_input(rank))
            y = Fault.apply(y, step == at_step and rank in failing)
            model[2:](y).square().sum().backward()
            outcomes.append(_error(_gradient(model), _reference(_square)))
        except (ArithmeticError, RuntimeError) as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize("failing", [(0, 1, 2), (1,)])
def test_an_exception_in_backward_reaches_all_ranks_and_leaves_the_reducer_usable(backend, at_step, failing):
    results = run_ranks(_fail_in_backward, 3, failing, at_step, backend=backend)
    for rank, outcomes in enumerate(results):
        for step, outcome in enumerate(outcomes):
            if step != at_step:
                assert outcome < 1e-12
            elif rank in failing:
                assert "no gradient today" in outcome
            else:
                assert "backward raised an exception on rank 1" in outcome


def _zeroed_by_one(locally):
    rank, model = dist.get_rank(), _chain()
    reducer, told = GradientReducer(model, **SMALL), []
    for step in range(4):
        if rank == 0 or step % 3 == 0:
            model.zero_grad()
        try:
            with reducer.no_sync() if locally else contextlib.nullcontext():
                _square(model, rank).backward()
            reducer.reduce() if step == 0 else _square(model, rank).backward()
        except ValueError as error:
            told.append((step, str(error)))
    return told, _error(_gradient(model), 2 * _reference(_square))


@pytest.mark.parametrize("locally", [False, True])
def test_gradients_that_one_rank_alone_zeroed(locally):
    for told, error in run_ranks(_zeroed_by_one, 2, locally):
        assert [step for step, _ in told] == [1] and "rank 1 had gradients of the last backward" in told[0][1]
        assert error < 1e-12


def _differ(how):
    rank = dist.get_rank()
    model = _chain(width=6 if how != "shape" or rank == 0 else 7)
    if how == "count" and rank == 1:
        model.append(nn.Linear(2, 2))
    GradientReducer(model, compression="fp16" if how == "options" and rank == 1 else "none")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "shape",
            "parameter 0 is '0.weight' Double [6, 4] strides [4, 1] on cpu on rank 0 and '0.weight' Double [7, 4]",
        ),
        ("count", "rank 0 has 6 and rank 1 has 8, and parameter 6 is no such parameter on rank 0 and '5.weight'"),
        ("options", "compression=none average=1 on rank 0 and bucket_bytes=26214400"),
    ],
)
def test_ranks_that_differ_are_refused_everywhere_with_one_message(how, message):
    with pytest.raises(RanksFailed, match=re.escape(message)) as caught:
        run_ranks(_differ, 2, how)
    assert set(caught.value.failures) == {0, 1}
    assert len({text.strip().splitlines()[-1] for text in caught.value.failures.values()}) == 1


def _of_another_group():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return GradientReducer(_chain(), group).group is group
    with pytest.raises(ValueError, match="rank 1 is none of them"):
        GradientReducer(_chain(), group)
    return True


def test_ranks_outside_of_the_group_make_no_reducer():
    assert all(run_ranks(_of_another_group, 2))


def _refusals():
    messages = []

    def note(fn):
        try:
            fn()
            messages.append("")
        except (RuntimeError, TypeError, ValueError) as error:
            messages.append(str(error))

    model = _chain()
    note(lambda: GradientReducer([]))
    note(lambda: GradientReducer([model[0].weight * 2]))
    note(lambda: GradientReducer(model, compression="int8"))
    note(lambda: GradientReducer(model, bucket_bytes=-1))
    sparse = nn.Embedding(4, 2, sparse=True)
    reducer = GradientReducer(sparse)
    note(lambda: sparse(torch.tensor([1])).sum().backward())
    del reducer
    return messages


def test_what_can_not_be_reduced_is_refused():
    empty, computed, compression, least, sparse = run_ranks(_refusals, 2)[0]
    assert "no parameter to reduce" in empty
    assert "must be a leaf" in computed
    assert "'none', 'fp16' or 'bf16', but it is 'int8'" in compression
    assert "bucket_bytes and first_bucket_bytes are least sizes in bytes, but they are -1 and " in least
    assert "must be dense" in sparse


def _broadcast(optimizer_class):
    rank = dist.get_rank()
    model = _chain()
    model.register_buffer("count", torch.tensor(rank))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    broadcast_parameters(model)
    optimizer = optimizer_class(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        _square(model, 0).backward()
        optimizer.step()
    broadcast_parameters(model.state_dict())
    broadcast_optimizer_state(optimizer)
    for _ in range(2):
        model.zero_grad()
        _square(model, 0).backward()
        optimizer.step()
    return _flat(model.parameters()).tolist(), model.count.item(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_models_and_optimizers_become_those_of_the_root(optimizer_class):
    results = run_ranks(_broadcast, 3, optimizer_class)
    assert results[0] == results[1] == results[2]
    assert results[0][1:] == (0, 0.1)
