"""Hooks of parameters, held back to the end of backward, that raise on some ranks or on all; a parameter that one rank alone freezes."""

import pytest
import torch
from models import make_layout
from torch import nn

import torchtp
import torchtp.horovod as hvd
from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks


def _reduced(model):
    return model, torch.optim.SGD(model.parameters(), 0.1), GradientReducer(model.parameters())


def _as_horovod(model):
    hvd.init()
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)), None


def _parallelized(model):
    torchtp.parallelize(model, make_layout({"w": 3}), output="full")
    # Steps too small for its own comparison of what ranks train.
    return model, torch.optim.SGD(model.parameters(), 1e-6), None


def _half_sent(model):
    return model, torch.optim.SGD(model.parameters(), 0.1), GradientReducer(model.parameters(), compression="fp16")


def _train(prepare, raising, at_step):
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, optimizer, keep = prepare(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 1, 1)))
    told = []  # a text of each step that is over

    def complain(_):
        if len(told) == at_step and rank in raising:
            raise OSError("nobody takes the log")

    model[0].weight.register_post_accumulate_grad_hook(complain)
    images = torch.rand(2, 2, 8, 12)
    for _ in range(5):
        optimizer.zero_grad()
        try:
            model(images).square().mean().backward()
            optimizer.step()
            told.append("")
        except (OSError, RuntimeError) as error:
            told.append(str(error))
            if "in the backward before this one" in str(error):
                for tensor in model.state_dict().values():
                    torch.distributed.broadcast(tensor, 0)
    del keep
    return told, torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize("prepare", [_reduced, _half_sent, _as_horovod, _parallelized])
@pytest.mark.parametrize("at_step", [0, 2])
def test_a_hook_that_raises_on_one_rank_is_told_by_the_next_backward(prepare, at_step):
    results = run_ranks(_train, 3, prepare, (1,), at_step, backend="torchtp")
    for rank, (told, parameters) in enumerate(results):
        expected = [""] * 5
        expected[at_step] = "nobody takes the log" if rank == 1 else ""
        expected[at_step + 1] = "a hook of a parameter raised an exception on rank 1 in the backward before this one"
        assert all(part in text and bool(part) == bool(text) for part, text in zip(expected, told, strict=True)), told
        assert torch.equal(parameters, results[0][1])


@pytest.mark.parametrize("prepare", [_reduced, _parallelized])
def test_a_hook_that_raises_on_all_ranks_parts_nobody(prepare):
    for told, parameters in run_ranks(_train, 3, prepare, (0, 1, 2), 2, backend="torchtp"):
        assert [bool(text) for text in told] == [False, False, True, False, False]
        assert parameters.isfinite().all()


def _freeze_on_one_rank():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    reducer = GradientReducer(model)
    for step in range(3):
        model[1].weight.requires_grad_(step < 2 or torch.distributed.get_rank() == 0)
        reducer.prepare()
        try:
            model(torch.rand(2, 3)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_parameter_that_one_rank_alone_freezes_is_named():
    first, second = run_ranks(_freeze_on_one_rank, 2, backend="torchtp", fresh=True)
    assert "ranks disagree" in first and "ranks disagree" in second
    assert "plans its buckets anew, since parameter '1.weight' was frozen, thawed" in second
