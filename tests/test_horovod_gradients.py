"""Backward through the calls of Horovod's face: what Horovod gives, which is the sum's gradient times a factor of each call's own."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import torchtp.horovod as hvd
from torchtp.testing import run_ranks

SIZE = 3
ROWS = 4


def _inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS + rank, 2, generator=generator, dtype=torch.float64) for rank in range(SIZE)]


def _same_rows():
    return [x[:ROWS] for x in _inputs()]


SPLITS = [[1, 3, 0], [0, 5, 0], [2, 2, 2]]  # by rank, rows for each


def _exchanged(xs):
    rows = [x.split(splits) for x, splits in zip(xs, SPLITS, strict=True)]
    return [torch.cat([of_rank[rank] for of_rank in rows]) for rank in range(SIZE)]


def _scattered(total):
    return list(total.tensor_split(SIZE))


# What a rank calls, the same of all ranks' tensors at once, and what Horovod's gradient is of that of the sum of losses.
CALLS = {
    "allreduce": (lambda x, rank: hvd.allreduce(x), lambda xs: [sum(xs) / SIZE] * SIZE, 1),
    "allreduce, sum": (
        lambda x, rank: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
        lambda xs: [sum(xs) / 2] * SIZE,
        1,
    ),
    "grouped_allreduce": (
        lambda x, rank: torch.stack(hvd.grouped_allreduce([x, 2 * x], average=False)),
        lambda xs: [torch.stack([sum(xs), 2 * sum(xs)])] * SIZE,
        1,
    ),
    "allgather": (lambda x, rank: hvd.allgather(x), lambda xs: [torch.cat(xs)] * SIZE, 1 / SIZE),
    "broadcast": (lambda x, rank: hvd.broadcast(x, 1), lambda xs: [xs[1]] * SIZE, 1 / SIZE),
    "alltoall": (lambda x, rank: hvd.alltoall(x, SPLITS[rank])[0], _exchanged, 1),
    "reducescatter": (lambda x, rank: hvd.reducescatter(x), lambda xs: _scattered(sum(xs) / SIZE), SIZE),
    "reducescatter, sum": (
        lambda x, rank: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5),
        lambda xs: _scattered(sum(xs) / 2),
        SIZE,
    ),
}
UNEVEN = ("allgather", "alltoall")


def _gradients():
    hvd.init()
    rank = hvd.rank()
    given = {}
    for name, (call, _, _) in CALLS.items():
        x = (_inputs() if name in UNEVEN else _same_rows())[rank].requires_grad_()
        y = call(x, rank)
        (grad,) = torch.autograd.grad((y.sin() * (rank + 1)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad * grad).sum(), x)
        given[name] = (y.detach(), grad.detach(), second)
    return given


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_gradients_are_those_of_horovod(backend):
    results = run_ranks(_gradients, SIZE, backend=backend)
    for name, (_, whole, factor) in CALLS.items():
        xs = [x.requires_grad_() for x in (_inputs() if name in UNEVEN else _same_rows())]
        ys = whole(xs)
        losses = [(y.sin() * (rank + 1)).sum() for rank, y in enumerate(ys)]
        grads = torch.autograd.grad(sum(losses), xs, create_graph=True, allow_unused=True)
        grads = [torch.zeros_like(x) if grad is None else grad * factor for grad, x in zip(grads, xs, strict=True)]
        seconds = torch.autograd.grad(sum((grad * grad).sum() for grad in grads), xs, allow_unused=True)
        for rank, (result, x) in enumerate(zip(results, xs, strict=True)):
            value, grad, second = result[name]
            torch.testing.assert_close(value, ys[rank].detach())
            torch.testing.assert_close(grad, grads[rank].detach(), msg=lambda text, name=name: f"{name}: {text}")
            assert second.shape == x.shape and second.isfinite().all()
            if factor == 1:  # else the factor is there twice in one way, once in the other
                torch.testing.assert_close(second, seconds[rank], msg=lambda text, name=name: f"{name}: {text}")


def _refused():
    hvd.init()
    x = torch.rand(3, requires_grad=True)
    told = []
    for call in (
        lambda: hvd.allreduce(x, op=hvd.Max),
        lambda: hvd.grouped_allreduce([x], op=hvd.Min)[0],
        lambda: hvd.reducescatter(x, op=hvd.Product),
    ):
        y = call()
        with pytest.raises(RuntimeError) as error:
            y.sum().backward()
        told.append(str(error.value))
    with torch.no_grad():
        plain = hvd.allreduce(x, op=hvd.Max)
    whole = hvd.allgather(torch.arange(2))
    return told, plain.requires_grad, whole.tolist()


def test_what_has_no_gradient_says_so_in_backward_alone():
    for told, requires_grad, whole in run_ranks(_refused, SIZE):
        assert [text.split(":")[0] for text in told] == ["allreduce", "grouped_allreduce", "reducescatter"]
        assert all("has no gradient: take Average or Sum" in text for text in told)
        assert not requires_grad and whole == [0, 1] * SIZE


def _contrasted():
    """Features of all ranks beside each other, as contrastive losses have them, trained by DistributedOptimizer."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4).double()
    images = torch.randn(SIZE, 2, 5, dtype=torch.float64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    features = model(images[hvd.rank()])
    (features @ hvd.allgather(features).T).exp().sum().log().backward()
    optimizer.synchronize()
    return [parameter.grad for parameter in model.parameters()]


def test_features_of_all_ranks_have_gradients():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4).double()
    images = torch.randn(SIZE, 2, 5, dtype=torch.float64)
    gathered = model(images.flatten(0, 1))
    own = gathered.unflatten(0, (SIZE, 2))
    left = gathered.detach()
    mine = sum((each @ left.T).exp().sum().log() for each in own) / SIZE
    others = sum((each.detach() @ gathered.T).exp().sum().log() for each in own) / SIZE**2
    expected = torch.autograd.grad(mine + others, list(model.parameters()))
    for grads in run_ranks(_contrasted, SIZE):
        torch.testing.assert_close(grads, list(expected))


def _train_without_backward(op):
    """Gradients that the script sets itself, once reduces itself, and a rank whose loss once reaches no parameter."""
    hvd.init()
    model = torch.nn.Linear(5, 4).double()
    hvd.broadcast_parameters(model.state_dict())
    plain = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    images = torch.randn(4, SIZE, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in range(4):
        optimizer.zero_grad()
        if step != 1:
            loss = model(images[step, hvd.rank()]).square().mean()
            for parameter, grad in zip(
                model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                parameter.grad = grad
        elif hvd.rank() == 0:
            model(images[step, 0]).square().mean().backward()
        if step == 2:
            optimizer.synchronize()
            optimizer.synchronize()
        if step == 3:
            for parameter in model.parameters():
                hvd.allreduce_(parameter.grad, op=op)
        with optimizer.skip_synchronize() if step == 3 else contextlib.nullcontext():
            optimizer.step()
        by_hand.zero_grad()
        seen = images[step] if step != 1 else images[step, :1]
        total = sum(plain(each).square().mean() for each in seen)
        (total / SIZE if op == hvd.Average else total).backward()
        by_hand.step()
    return [*model.state_dict().values()], [*plain.state_dict().values()]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_step_without_a_backward_reduces_what_there_is(op):
    for mine, wanted in run_ranks(_train_without_backward, SIZE, op, backend="torchtp"):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
