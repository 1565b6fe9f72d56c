"""Gradients whose memory, or whose steps, are the program's: zeroed after a failure, shared with processes, stepped in backward."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from models import Fault
from torch import nn

from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks


def _loss(model, rank, raises=False):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    return Fault.apply(model[0](x), raises).square().sum()


def _worst(model):
    """How far gradients are from the means that one process computes."""
    losses = torch.stack([_loss(model, rank) for rank in range(dist.get_world_size())])
    means = torch.autograd.grad(losses.mean(), list(model.parameters()))
    pairs = zip(model.parameters(), means, strict=True)
    return torch.stack([(p.grad - mean).abs().max() for p, mean in pairs]).max().item()


def _zeroed_after_a_failure(packing):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    _reducer = GradientReducer(model[0], packing=packing)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for _ in range(2):
        _loss(model, rank).backward()
    with contextlib.suppress(ArithmeticError, RuntimeError):
        if rank == 1:
            store.wait(["zeroed"])  # before this one takes part
        fault = Fault.apply(model[0].weight.sum(), rank == 0)  # after the bias has its gradient
        (fault + _loss(model, rank)).backward()
    model.zero_grad(set_to_none=False)
    store.set("zeroed", "")
    _loss(model, rank).backward()
    return _worst(model[:1])


@pytest.mark.parametrize("packing", ["each", "together"])
def test_gradients_zeroed_after_a_failure_stay_zero(packing):
    assert all(error < 1e-5 for error in run_ranks(_zeroed_after_a_failure, 2, packing, backend="torchtp"))


def _shared_with_processes():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 2))
    _reducer = GradientReducer(model)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        _loss(model, dist.get_rank()).backward()
    model.share_memory()  # its gradients too
    model.zero_grad(set_to_none=False)
    _loss(model, dist.get_rank()).backward()
    return _worst(model)


def test_gradients_in_memory_of_other_processes_are_reduced():
    assert all(error < 1e-5 for error in run_ranks(_shared_with_processes, 2))


def _given_up():
    """What a hook makes of a gradient after a batch that was given up; the mean of what the ranks add is -6."""
    weight = nn.Parameter(torch.zeros(1))
    reducer = GradientReducer([weight])
    weight.register_hook(lambda grad: grad.clamp(-1, 1))

    def backward():
        output = weight * (-12 if dist.get_rank() else 0)
        reducer.watch(output)
        output.backward()

    backward()
    with reducer.no_sync():
        backward()
    weight.grad = None
    backward()
    return weight.grad.item()


def test_hooks_see_the_mean_after_a_batch_that_was_given_up():
    assert run_ranks(_given_up, 2) == [-1, -1]


def _experts(watches):
    """The parameters after steps in backward, when each rank's batch reaches an expert of its own."""
    torch.manual_seed(3)
    experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
    reducer = GradientReducer(experts)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in experts.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=False)

    for parameter in experts.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(4):
        rank = dist.get_rank()
        output = experts[0 if number == 0 else rank](torch.ones(3, 4) + rank)
        if number == 2:
            output = output * 0  # a gradient, of zeros
        if watches:
            reducer.watch(output)
        output.square().sum().backward()
    return [p.detach() for p in experts.parameters()]


@pytest.mark.parametrize("watches", [False, True])
def test_who_steps_in_backward_steps_on_all_ranks(watches):
    first, second = run_ranks(_experts, 2, watches)
    assert all(map(torch.equal, first, second))
