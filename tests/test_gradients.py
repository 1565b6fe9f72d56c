import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks


class Net(nn.Module):
    """Convolutions (one channels_last), a norm, a tied and a frozen weight, parameters that some passes leave out."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(1, 5)
        self.scale = nn.Parameter(torch.rand(5, 1, 1))
        self.mix = nn.Conv2d(5, 5, 1)
        self.extra = nn.Linear(5, 5)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x, extra=True):
        x = self.norm(self.stem(x)).relu() * self.scale
        x = self.mix(self.mix(x).tanh()).mean((2, 3))
        if extra:
            x = x + self.extra(x)
        return self.frozen(self.head(x))


def _net(dtype=torch.float64):
    torch.manual_seed(1)
    return Net().to(dtype)


def _batch(step, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 2, 6, 7, generator=generator, dtype=torch.float64).to(dtype)


def _loss(output):
    return (output - 1).square().mean()


def _small(model, **options):
    options = {"bucket_bytes": 300, "first_bucket_bytes": 100} | options
    return GradientReducer(model, **options)


def _mean_gradients(model, inputs, loss=_loss):
    """The reference: one process, the mean of the ranks' losses."""
    model.zero_grad(set_to_none=True)
    torch.stack([loss(model(x)) for x in inputs]).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _difference(model, wanted):
    """Largest relative difference of gradients, NaN if one is (Python's max passes over it); both have them."""
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(got) == set(wanted), set(got) ^ set(wanted)
    scale = max(g.abs().max() for g in wanted.values())
    return torch.stack([(got[name] - wanted[name]).abs().max() / scale for name in wanted]).max().item()


def _train(wrap, make_optimizer, set_to_none, clip, steps=5):
    model = _net()
    run = wrap(model)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        _loss(run(_batch(step, dist.get_rank()))).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def _ddp(model):
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def _reduced(model):
    model.reducer = _small(model)
    return model


def _train_both(optimizer, set_to_none, clip):
    ours = _train(_reduced, optimizer, set_to_none, clip)
    theirs = _train(_ddp, optimizer, set_to_none, clip)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "torchtp")])
@pytest.mark.parametrize("optimizer", [_sgd, _adamw])
@pytest.mark.parametrize(("set_to_none", "clip"), [(True, False), (False, True)])
def test_five_steps_equal_stock_ddp(size, backend, optimizer, set_to_none, clip):
    assert all(error < 1e-12 for error in run_ranks(_train_both, size, optimizer, set_to_none, clip, backend=backend))


def _gradients(steps, set_to_none):
    model, reference = _net(), _net()
    reducer = _small(model)
    differences = []
    for step in range(steps):
        model.zero_grad(set_to_none=set_to_none)
        _loss(model(_batch(step, dist.get_rank()))).backward()
        wanted = _mean_gradients(reference, [_batch(step, rank) for rank in range(dist.get_world_size())])
        differences.append(_difference(model, wanted))
    strides = model.stem.weight.grad.stride() == model.stem.weight.stride()
    held = [reducer.holds(name) for name in wanted]
    return differences, strides, held, reducer.buckets


def _kept(packing):
    """What is left of a gradient after zero_grad(): itself, what detach() or .data gave of it, a part of it."""
    model = _net()
    reducer = _small(model, packing=packing)
    keeping = [lambda grad: grad, lambda grad: grad.detach(), lambda grad: grad.data, lambda grad: grad[1:]]
    kept, copies = [], []
    for step in range(8):
        model.zero_grad()
        _loss(model(_batch(step, dist.get_rank()), extra=step != 6)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                kept.append(keeping[step % 4](parameter.grad))
                copies.append(kept[-1].clone())
    assert reducer.holds("stem.weight")
    assert all(map(torch.equal, kept, copies))


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
@pytest.mark.parametrize("packing", ["each", "together"])
def test_a_gradient_that_is_kept_keeps_its_numbers(packing, backend):
    run_ranks(_kept, 2, packing, backend=backend)


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "torchtp"), (4, "torchtp")])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_is_the_mean_and_lies_in_its_bucket(size, backend, set_to_none):
    results = run_ranks(_gradients, size, 3, set_to_none, backend=backend)
    for differences, strides, held, buckets in results:
        assert all(error < 1e-12 for error in differences)
        assert strides and all(held)
        assert buckets == results[0][3]
    buckets = results[0][3]
    assert len(buckets) > 3
    # In the order of backward: the head first, what got no gradient last.
    assert buckets[0][0].startswith("head.")
    assert "unused.weight" in {name for names in buckets[-3:] for name in names}
    assert not any(name.startswith("frozen.") for names in buckets for name in names)


def _order_log():
    model = _net()
    reducer = _small(model)
    _loss(model(_batch(0, dist.get_rank()))).backward()
    reducer.record()
    model.zero_grad()
    _loss(model(_batch(1, dist.get_rank()))).backward()
    return reducer.events, reducer.statistics, [len(names) for names in reducer.buckets]


def test_buckets_leave_while_backward_runs():
    for events, statistics, sizes in run_ranks(_order_log, 2, backend="torchtp"):
        last_ready = max(i for i, event in enumerate(events) if event[0] == "ready")
        starts = [event[1] for event in events if event[0] == "start"]
        early = [event[1] for event in events[:last_ready] if event[0] == "start"]
        assert starts == list(range(len(sizes)))
        assert 0 in early and len(early) >= 3
        # The first one leaves as soon as its last gradient is there.
        first = events.index(("start", 0))
        assert sum(event[0] == "ready" for event in events[:first]) == sizes[0]
        assert statistics.num_backwards == 2 and statistics.num_buckets == len(sizes)
        assert 0 <= statistics.hidden_seconds <= statistics.communication_seconds


def _accumulate(no_sync, on_top):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = _net(), _net()
    reducer = _small(model)
    errors = []
    for round_ in range(2):
        model.zero_grad()
        steps = [3 * round_, 3 * round_ + 1, 3 * round_ + 2]
        for i, step in enumerate(steps):
            last = i == len(steps) - 1
            with reducer.no_sync() if no_sync and not last else contextlib.nullcontext():
                _loss(model(_batch(step, rank), extra=i == 0)).backward()
        if on_top:
            # On top of what is already global, once without and once with synchronisation.
            with reducer.no_sync():
                _loss(model(_batch(50, rank))).backward()
            _loss(model(_batch(51, rank))).backward()
            steps += [50, 51]
        reference.zero_grad()
        for i, step in enumerate(steps):
            for r in range(size):
                (_loss(reference(_batch(step, r), extra=i in (0, 3, 4))) / size).backward()
        wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        errors.append(_difference(model, wanted))
    return torch.tensor(errors).max().item()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("on_top", [True, False])
def test_accumulation_is_right_before_and_after_reduction(size, no_sync, on_top):
    assert all(error < 1e-12 for error in run_ranks(_accumulate, size, no_sync, on_top))


def _unused_on_some_ranks():
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = _net(), _net()
    reducer = _small(model)
    errors = []
    for step in range(4):
        model.zero_grad()
        _loss(model(_batch(step, rank), extra=(rank + step) % 2 == 0)).backward()
        reference.zero_grad()
        for r in range(size):
            (_loss(reference(_batch(step, r), extra=(r + step) % 2 == 0)) / size).backward()
        wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        errors.append(_difference(model, wanted))
    assert reducer.statistics.num_backwards == 4
    return torch.tensor(errors).max().item()


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_without_gradient_on_some_ranks_count_as_zero(size):
    assert all(error < 1e-12 for error in run_ranks(_unused_on_some_ranks, size))


def _only_some_ranks_reach_a_parameter():
    rank = dist.get_rank()
    model = nn.Linear(2, 2, dtype=torch.float64)
    reducer = GradientReducer(model)
    for _ in range(2):
        model.zero_grad()
        x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
        output = model(x) if rank == 0 else x * 2
        reducer.watch(output)
        output.sum().backward()
    return model.bias.grad.tolist()


def test_a_watched_output_reduces_where_no_parameter_is_reached():
    assert run_ranks(_only_some_ranks_reach_a_parameter, 2) == [[0.5, 0.5]] * 2


def _change_parameters():
    """Frozen parameters are trained, alone or with the others, of which the reducer is not told, and dtypes change."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _net()
    model.head.requires_grad_(False)
    reducer = _small(model)
    errors = []
    for step, (trained, dtype) in enumerate(
        (
            ("stem norm mix extra", torch.double),
            ("stem norm mix extra", torch.double),
            ("head", torch.double),
            ("stem norm head", torch.double),
            ("stem norm extra", torch.float),
            ("stem norm mix extra head", torch.double),
        )
    ):
        if dtype != model.scale.dtype:
            model.to(dtype)
            reducer.prepare()
        model.zero_grad()
        for name, part in model.named_children():
            part.requires_grad_(name in trained.split())
        model.scale.requires_grad_(trained != "head")
        _loss(model(_batch(step, rank, dtype))).backward()
        wanted = _mean_gradients(copy.deepcopy(model), [_batch(step, other, dtype) for other in range(size)])
        errors.append(_difference(model, wanted) / torch.finfo(dtype).eps)
    return torch.tensor(errors).max().item()


def test_parameters_are_thawed_alone_and_change_their_dtype():
    assert all(error < 1000 for error in run_ranks(_change_parameters, 2, backend="torchtp"))


def _other_memory(way, packing, set_to_none):
    """Whoever casts a module or assigns to `grad.data` puts other memory under the gradient that lay in its bucket."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _net()
    # All of these have a gradient: each lies in a bucket, and is cast with its parameter.
    trained = [item for item in model.named_parameters() if item[0].split(".")[0] not in ("unused", "frozen")]
    reducer = _small(trained, packing=packing)
    errors = []
    for step in range(5):
        dtype = torch.float if way == "cast" and step % 2 else torch.double
        if way == "cast":
            model.to(dtype)
            reducer.prepare()
        elif step:
            for parameter in model.parameters():
                if parameter.grad is not None and way == "assigned":
                    parameter.grad.data = parameter.grad.data.clamp(-1, 1)
                elif parameter.grad is not None:
                    parameter.grad.set_(torch.ones_like(parameter.grad))
        model.zero_grad(set_to_none)
        _loss(model(_batch(step, rank, dtype))).backward()
        wanted = _mean_gradients(copy.deepcopy(model), [_batch(step, other, dtype) for other in range(size)])
        errors.append(_difference(model, wanted) / torch.finfo(dtype).eps)
    assert reducer.holds("stem.weight")
    return torch.tensor(errors).max().item()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("packing", ["each", "together"])
@pytest.mark.parametrize("way", ["cast", "assigned", "set"])
def test_gradients_that_got_other_memory_are_reduced(way, packing, set_to_none):
    assert all(error < 1000 for error in run_ranks(_other_memory, 2, way, packing, set_to_none, backend="torchtp"))


def _hooks_of_users():
    model, seen = nn.Linear(2, 2), []
    model.bias.requires_grad_(False)
    model.weight.register_hook(lambda grad: seen.append("before the reducer"))
    reducer = _small(model)  # noqa: F841
    model.weight.register_hook(lambda grad: seen.append("after the reducer"))
    model.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
    model.bias.requires_grad_().register_hook(lambda grad: seen.append("thawed"))
    model(torch.ones(1, 2)).sum().backward()
    return seen


def test_hooks_of_users_on_parameters_stay():
    for seen in run_ranks(_hooks_of_users, 2):
        assert sorted(seen) == ["accumulated", "after the reducer", "before the reducer", "thawed"]
