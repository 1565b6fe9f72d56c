"""Parameters of which others than one reducer hear: DistributedDataParallel is no harm, a second reducer is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import Fault, make_layout
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchtp
from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks


def _tasks():
    torch.manual_seed(0)
    return [nn.Linear(64, 64).double(), nn.Linear(64, 1).double(), nn.Linear(64, 1).double()]


def _inputs(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 64, generator=generator, dtype=torch.float64).chunk(dist.get_world_size())


def _loss(modules, x):
    return modules[1](modules[0](x).tanh()).square().mean()


def _backward(modules, step):
    _loss(modules, _inputs(step)[dist.get_rank()]).backward()


def _error_of(step, modules):
    """What the gradient differs by from the whole batch's, or what is raised."""
    for module in modules:
        module.zero_grad()
    try:
        _backward(modules, step)
    except ValueError as error:
        return str(error)
    want = torch.autograd.grad(_loss(modules, torch.cat(_inputs(step))), modules[0].weight)[0]
    return (modules[0].weight.grad - want).abs().max().item()


def _two_reducers(packing):
    encoder, *heads = modules = _tasks()
    options = {"packing": packing, "first_bucket_bytes": 0}
    reducers = [GradientReducer(nn.ModuleList([encoder, head]), dist.new_group(), **options) for head in heads]
    errors = [_error_of(0, modules)]
    with reducers[1].no_sync():
        errors.append(_error_of(1, modules))
    cycle = [reducers.pop()]
    cycle.append(cycle)
    del cycle
    return [*errors, _error_of(2, modules)]


@pytest.mark.parametrize("packing", ["each", "together"])
def test_a_parameter_of_two_reducers_is_refused_on_all_ranks(packing):
    for both, one_rests, one_is_gone in run_ranks(_two_reducers, 2, packing, backend="torchtp"):
        assert "parameter '0." in both and "has two reducers" in both
        assert one_rests < 1e-14 and one_is_gone < 1e-14


def _reducer_of_a_parallelized_module():
    layout = make_layout({"h": 2})
    model = torchtp.parallelize(nn.Conv2d(3, 4, 3, padding=1), layout, output="full")
    reducer = GradientReducer(model)
    try:
        model(torch.ones(1, 3, 4, 4)).sum().backward()
    except ValueError as error:
        return str(error), reducer.syncs
    return "nothing was raised"


def test_a_reducer_of_a_parallelized_module_is_refused():
    for error, _ in run_ranks(_reducer_of_a_parallelized_module, 2, backend="torchtp"):
        assert "parallelize with reduce=False" in error


def _fail_in_the_second_of_two():
    modules = _tasks()[:2]
    reducer = GradientReducer(nn.ModuleList(modules))
    reducer.reduce_every(2)
    errors = []
    for step in range(4):
        for module in modules:
            module.zero_grad()
        want = 0.0
        for call in (2 * step, 2 * step + 1):
            x = _inputs(call)[dist.get_rank()]
            hidden = Fault.apply(modules[0](x), step == 1 and call == 3 and dist.get_rank() == 1)
            want += torch.autograd.grad(_loss(modules, torch.cat(_inputs(call))), modules[0].weight)[0]
            try:
                modules[1](hidden.tanh()).square().mean().backward()
            except (ArithmeticError, RuntimeError):
                continue
        errors.append((modules[0].weight.grad - want).abs().max().item())
        assert reducer.num_unreduced == 0
    return errors[:1] + errors[2:]


def test_after_a_backward_that_raised_all_ranks_count_alike():
    for errors in run_ranks(_fail_in_the_second_of_two, 2, backend="torchtp"):
        assert all(error < 1e-13 for error in errors)


def _beside_ddp(ddp_comes_last):
    """Whichever hears first of a gradient, DistributedDataParallel must not read what the reducer has under way."""
    alone = nn.Sequential(*_tasks()[:2])
    modules = copy.deepcopy(alone)
    made = []
    for make in (GradientReducer, DistributedDataParallel)[:: 1 if ddp_comes_last else -1]:
        options = {"bucket_bytes": 0, "first_bucket_bytes": 0} if make is GradientReducer else {}
        made.append(make(modules, **options))
    wrapped = next(one for one in made if isinstance(one, DistributedDataParallel))
    errors = []
    for step in range(30):
        modules.zero_grad()
        alone.zero_grad()
        wrapped(_inputs(step)[dist.get_rank()]).square().mean().backward()
        alone(torch.cat(_inputs(step))).square().mean().backward()
        for mine, want in zip(modules.parameters(), alone.parameters(), strict=True):
            errors.append((mine.grad - want.grad).abs().max().item())
    return torch.tensor(errors).max().item()


@pytest.mark.parametrize("ddp_comes_last", [True, False])
def test_distributed_data_parallel_beside_a_reducer_is_exact(ddp_comes_last):
    assert all(error < 1e-13 for error in run_ranks(_beside_ddp, 2, ddp_comes_last, backend="torchtp"))
