import copy
import io

import pytest
import torch
import torch.distributed as dist
from models import Fault
from torch import nn

import torchtp.horovod as hvd
from torchtp.testing import run_ranks


def _model():
    torch.manual_seed(3 + hvd.rank())
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def _input(seed):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _loss(model, seed):
    return model(_input(seed)).square().sum()


def _flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _train(op, passes, calls):
    """Three steps of `calls` backwards each, and of a single process on all ranks' inputs; the largest difference."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    model, reference = _model(), _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, op=op
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    alone = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    schedule_alone = torch.optim.lr_scheduler.StepLR(alone, 1, 0.9)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        for call in range(calls):
            _loss(model, 100 * step + 10 * call + rank).backward()
            for r in range(size):
                (_loss(reference, 100 * step + 10 * call + r) / (size if op == hvd.Average else 1)).backward()
        optimizer.step()
        alone.step()
        schedule.step()
        schedule_alone.step()
    return (_flat(model) - _flat(reference)).abs().max().item()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize(("passes", "calls"), [(1, 1), (3, 3), (3, 2)])
def test_a_distributed_optimizer_steps_as_one_process_does(op, passes, calls):
    assert all(error < 1e-12 for error in run_ranks(_train, 2, op, passes, calls, backend="torchtp"))


def _scheduled_before():
    """The scheduler is of the plain optimizer, as in many scripts; each step has fewer backwards than a reduction is of."""
    hvd.init()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
    _loss(model, hvd.rank()).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    optimizer.step(lambda: _loss(model, 10 + hvd.rank()).backward())
    return _flat(model)


@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_a_scheduler_may_be_made_before():
    first, second = run_ranks(_scheduled_before, 2, backend="torchtp")
    assert first.equal(second)


def _closure():
    """A closure with fewer backwards than a reduction is of: what it has added is reduced when it ends."""
    hvd.init()
    model, reference = _model(), _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), model.named_parameters(), backward_passes_per_step=2
    )
    alone = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=3)

    def closure(optimizer, losses):
        optimizer.zero_grad()
        total = sum(losses()) / len(losses())
        total.backward()
        return total

    for _ in range(2):
        optimizer.step(lambda: closure(optimizer, lambda: [_loss(model, hvd.rank())]))
        alone.step(lambda: closure(alone, lambda: [_loss(reference, rank) for rank in range(hvd.size())]))
    return (_flat(model) - _flat(reference)).abs().max().item()


def test_a_closure_leaves_the_gradients_of_all_ranks():
    assert all(error < 1e-12 for error in run_ranks(_closure, 2, backend="torchtp"))


def _give_up(where):
    """Rank 1 gives up its second batch in the first of two backwards, or in the forward between them, as when memory is full."""
    hvd.init()
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), backward_passes_per_step=2
    )
    errors = []
    # A batch that is given up before its reduction is told to nobody: the next one takes its place.
    for step in range(4 + (where == "forward" and hvd.rank() == 1)):
        fails = step == 1 and hvd.rank() == 1
        optimizer.zero_grad()
        try:
            for call in range(2):
                if fails and where == "forward" and call == 1:
                    raise ArithmeticError("no room")
                features = model[:2](_input(100 * step + 10 * call + hvd.rank()))
                model[2](Fault.apply(features, fails and where == "backward")).square().sum().backward()
        except (ArithmeticError, RuntimeError) as error:
            errors.append((step, str(error)))
            continue
        optimizer.step()
    return errors, _flat(model)


@pytest.mark.parametrize("where", ["backward", "forward"])
def test_a_batch_that_one_rank_gives_up_halfway_leaves_all_with_one_model(where):
    (first_errors, first), (second_errors, second) = run_ranks(_give_up, 2, where, backend="torchtp")
    assert first.equal(second)
    assert [step for step, _ in second_errors] == [1]
    if where == "backward":
        assert [step for step, _ in first_errors] == [1]
        assert "backward raised an exception on rank 1" in first_errors[0][1]
    else:
        assert first_errors == []


def _copies():
    hvd.init()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, gradient_predivide_factor=2.0, num_groups=3, groups=None, sparse_as_dense=False
    )
    _loss(model, 3).backward()
    optimizer.step()
    stored = io.BytesIO()
    torch.save(optimizer, stored)
    stored.seek(0)
    copies = [torch.load(stored, weights_only=False), copy.deepcopy(optimizer)]
    for one in copies:
        assert type(one) is torch.optim.SGD and one.param_groups[0]["momentum"] == 0.9
        (mine, theirs) = (each.param_groups[0]["params"][0] for each in (optimizer, one))
        assert optimizer.state[mine]["momentum_buffer"].equal(one.state[theirs]["momentum_buffer"])


def test_copies_of_a_distributed_optimizer_are_plain():
    run_ranks(_copies, 2, backend="torchtp")


def _hooked():
    """Its hooks run once a step, also on ranks that have loaded the root's state."""
    hvd.init()
    model, steps = _model(), []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
    optimizer.register_step_post_hook(lambda *_: steps.append("after"))
    _loss(model, hvd.rank()).backward()
    optimizer.step()
    return steps


def test_hooks_of_a_step_run_once_after_a_state_was_loaded():
    assert run_ranks(_hooked, 2, backend="torchtp") == [["before", "after"]] * 2


def _state_of_another_dtype():
    """NAdam keeps a number in fp32 beside parameters of any dtype."""
    hvd.init()
    model = _model()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)
    if hvd.rank() == 0:
        _loss(model, 0).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return [optimizer.state[parameter]["mu_product"] for parameter in model.parameters()]


def test_a_state_that_is_broadcast_keeps_its_dtypes():
    theirs, mine = run_ranks(_state_of_another_dtype, 2, backend="torchtp")
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _collectives():
    hvd.init()
    rank = hvd.rank()
    x = torch.full((2, 3), rank + 1.0)
    transposed = torch.arange(6.0).view(2, 3).t() + rank
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    results = {
        "average": hvd.allreduce(x),
        "sum": hvd.synchronize(handle),
        "again": hvd.synchronize(handle),
        "half": hvd.allreduce(x * 30000, compression=hvd.Compression.fp16),
        "max": hvd.allreduce(torch.tensor(rank), op=hvd.Max),
        "integers": hvd.allreduce(torch.tensor(rank * 3)),
        "gathered": hvd.allgather(torch.full((rank, 2), float(rank))),
        "broadcast": hvd.broadcast(x, 1),
        "object": hvd.broadcast_object({"rank": rank}, 1),
        "strided": hvd.broadcast_(transposed, 1),
        "parameter": hvd.allreduce_(torch.nn.Parameter(x.clone()), compression=hvd.Compression.bf16),
        "places": (hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), hvd.poll(handle)),
    }
    assert x.equal(torch.full((2, 3), rank + 1.0)) and dist.is_initialized()
    return results


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_collectives(backend):
    for rank, results in enumerate(run_ranks(_collectives, 3, backend=backend)):
        assert results["average"].equal(torch.full((2, 3), 2.0))
        assert results["sum"].equal(torch.full((2, 3), 6.0)) and results["again"] is not None
        torch.testing.assert_close(results["half"], torch.full((2, 3), 60000.0), rtol=1e-3, atol=0)
        assert (results["max"].item(), results["integers"].item()) == (2, 3)
        assert results["gathered"].tolist() == [[1, 1], [2, 2], [2, 2]]
        assert results["broadcast"].equal(torch.full((2, 3), 2.0))
        assert results["object"] == {"rank": 1}
        assert results["strided"].equal(torch.arange(6.0).view(2, 3).t() + 1)
        assert results["parameter"].equal(torch.full((2, 3), 2.0)) and results["parameter"].is_leaf
        assert results["places"] == (rank, rank, 3, 3, True)
