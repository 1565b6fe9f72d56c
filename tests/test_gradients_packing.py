"""Buckets packed by the kernels in one launch (on the CPU: their twin) hold the same bits as those filled copy by copy."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchtp.gradients import GradientReducer
from torchtp.testing import RanksFailed, run_ranks


class Net(nn.Module):
    """Weights of several layouts and dtypes; one is tied, one is left out at times, the gradient of one comes in other strides."""

    def __init__(self, dtype):
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.mix = nn.Conv2d(5, 5, 1)
        self.turned = nn.Parameter(torch.rand(5, 7))
        self.spectrum = nn.Parameter(torch.rand(3, 2, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.rand(4, dtype=torch.float64))
        self.extra = nn.Linear(5, 5)
        self.never = nn.Linear(3, 3)
        self.stem.to(dtype)
        self.mix.to(dtype)

    def forward(self, x, extra):
        x = self.stem(x.to(self.stem.weight.dtype)).relu()
        x = self.mix(self.mix(x).tanh()).float().mean((2, 3))
        if extra:
            x = x + self.extra(x)
        x = x @ _Turned.apply(self.turned)
        return x.square().mean() + self.spectrum.conj().abs().square().mean() + self.exact.square().mean().float()


class _Turned(torch.autograd.Function):
    """Gives the same matrix, and its gradient transposed in memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.t().contiguous().t()


def _input(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, 2, 6, 7, generator=generator)


def _train(packing, dtype, options):
    torch.manual_seed(1)
    model = Net(dtype)
    reducer = GradientReducer(model, bucket_bytes=300, first_bucket_bytes=100, packing=packing, **options)
    seen = []
    for step in range(7):
        if step != 5:  # on top of what is already reduced
            model.zero_grad(set_to_none=step % 3 != 0)
        extra = step % 2 == dist.get_rank() % 2
        if step == 4:
            with reducer.no_sync():
                model(_input(20), extra).backward()
        graph = step == 6
        model(_input(step), extra).backward(create_graph=graph)
        gradients = [p.grad for p in model.parameters()]
        assert all(gradient is None or bool(gradient.grad_fn) <= graph for gradient in gradients)
        seen += [None if gradient is None else gradient.detach().clone() for gradient in gradients]
    return seen, reducer


def _both(dtype, options):
    each, _ = _train("each", dtype, options)
    together, reducer = _train("together", dtype, options)
    assert len(reducer.buckets) > 3
    assert sum(gradient is None for gradient in each) == 2 * 7  # of `never`
    for a, b in zip(each, together, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride() and torch.equal(a, b)
    return True


@pytest.mark.parametrize(
    ("size", "backend", "dtype", "options"),
    [
        (2, "gloo", torch.float32, {}),
        (3, "torchtp", torch.float32, {}),
        (3, "torchtp", torch.bfloat16, {"compression": "fp16"}),
        (3, "gloo", torch.float32, {"compression": "bf16"}),
        (2, "torchtp", torch.float16, {"compression": "bf16"}),
    ],
)
def test_packed_together_the_gradients_are_the_same(size, backend, dtype, options):
    assert all(run_ranks(_both, size, dtype, options, backend=backend))


def _sums(options):
    """The sum over the ranks instead of the mean: gradients are zeroed between two backwards."""
    found = []
    for packing in ("each", "together"):
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        reducer = GradientReducer(model, packing=packing, average=False, **options)
        for step in range(3):
            model.zero_grad()
            model(_input(step).reshape(-1, 4)).square().sum().backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in reducer.parameters]))
    return torch.equal(*found)


@pytest.mark.parametrize("options", [{}, {"compression": "bf16"}])
def test_packed_together_the_sums_are_the_same(options):
    assert all(run_ranks(_sums, 2, options, backend="torchtp"))


def _fails_on_rank_1():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reducer = GradientReducer(model, bucket_bytes=20, first_bucket_bytes=20, packing="together", compression="bf16")
    x = torch.ones(2, 4)
    model(x).sum().backward()
    model.zero_grad()
    reducer.prepare()
    y = model[0](x)
    if dist.get_rank() == 1:
        y.register_hook(lambda gradient: 1 / 0)
    try:
        model[1](y).sum().backward()
    except (RuntimeError, ZeroDivisionError) as error:
        message = str(error)
    reducer.prepare()
    model.zero_grad()
    model(x).sum().backward()
    return message, [p.grad.clone() for p in model.parameters()]


def test_a_failure_reaches_all_ranks_when_packed_together():
    (message, mine), (_, theirs) = run_ranks(_fails_on_rank_1, 2, backend="torchtp")
    assert "raised an exception on rank 1" in message
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(mine, theirs, strict=True))


def _clip(packing, dtype, most):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 3)).to(dtype)
    unused = nn.Parameter(torch.rand(5, dtype=dtype))
    reducer = GradientReducer([*model.parameters(), unused], packing=packing, first_bucket_bytes=20)
    for step in range(2):
        model.zero_grad()
        model(_input(step).reshape(-1, 4).to(dtype)).square().sum().backward()
    assert (reducer._reducer.clip_norm(1e30) is not None) == (packing == "together")
    wanted = [p.grad.clone().requires_grad_() for p in model.parameters()]
    for p in wanted:
        p.grad = p.detach().clone()
    expected = nn.utils.clip_grad_norm_(wanted, most)
    norm = reducer.clip_grad_norm_(most)
    errors = [
        (p.grad - q.grad).abs().max() / q.grad.abs().max() for p, q in zip(model.parameters(), wanted, strict=True)
    ]
    return ((norm - expected).abs() / expected).item(), torch.stack(errors).max().item(), unused.grad


@pytest.mark.parametrize("packing", ["each", "together"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("most", [1e-3, 1e6])
def test_clipping_is_that_of_torch(packing, dtype, tolerance, most):
    for norm, error, unused in run_ranks(_clip, 2, packing, dtype, most, backend="torchtp"):
        assert norm < tolerance and error < tolerance and unused is None


def _set_aside():
    """A gradient that was kept, of a parameter that has none now: what clipping writes into the bucket reaches it not."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    reducer = GradientReducer(parameters, packing="together")
    for _ in range(2):
        sum(p.square().sum() for p in parameters).backward()
    kept, parameters[0].grad = parameters[0].grad, None
    wanted = kept.clone()
    return reducer.clip_grad_norm_(1e-3).item(), torch.equal(kept, wanted)


def test_clipping_leaves_a_gradient_that_was_set_aside_as_it_is():
    norm = pytest.approx(4 * 3**0.5, rel=1e-5)
    assert run_ranks(_set_aside, 2, backend="torchtp") == [(norm, True)] * 2


def _infinite():
    parameter = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([parameter], packing="together")
    for _ in range(2):
        parameter.grad = None
        (parameter * torch.tensor([1.0, float("inf"), 1.0])).sum().backward()
    return reducer.clip_grad_norm_(1.0).isfinite().item()


def test_a_norm_that_is_not_finite_is_told():
    assert run_ranks(_infinite, 2, backend="torchtp") == [False, False]


def _unknown():
    GradientReducer(nn.Linear(2, 2), packing="later")


def test_an_unknown_packing_is_refused():
    with pytest.raises(RanksFailed, match="'auto', 'each' or 'together', but it is 'later'"):
        run_ranks(_unknown, 2)
