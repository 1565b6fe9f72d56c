"""depthwise_layer_norm, whole and cut, against F.conv2d and F.layer_norm in float64; its kernel's twin, halos in pieces."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sharding import (
    Sharding,
    assert_same,
    layout_of,
    left_where_they_arrive,
    random_layout,
    shardings,
    total,
)
from torchtp.testing import run_ranks

OPS = torch.ops.torchtp
NO_CUT: tuple[list[int], list[int], list[str]] = ([], [], [])
EPS = 1e-5
# Of the largest value: a rounding of the result, and sums in float32.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _reference(x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, params) -> Tensor:
    convolved = F.conv2d(x, weight, bias, *params, x.shape[1])
    normed = F.layer_norm(convolved.movedim(1, -1), (x.shape[1],), norm_weight, norm_bias, EPS)
    return normed.movedim(-1, 1)


def _draw(rng: random.Random, kernels: list[list[int]], steps: bool):
    """Kernel, then stride, padding and dilation, and extents of an image that has an output."""
    kernel = rng.choice(kernels)
    stride = rng.choice([[1, 1], [2, 2], [3, 2]]) if steps else [1, 1]
    dilation = rng.choice([[1, 1], [2, 1]]) if steps else [1, 1]
    padding = [rng.randint(0, k // 2 + 1) for k in kernel]
    smallest = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    return kernel, (stride, padding, dilation), [s + rng.randint(0, 20) for s in smallest]


def _inputs(rng: random.Random, channels: int, kernel: list[int], extents: list[int], dtype=torch.float64):
    """Image, filters and bias of the convolution, weight and bias of the norm."""
    x = torch.randn(rng.choice([1, 2]), channels, *extents, dtype=torch.float64)
    sizes = [(channels, 1, *kernel), (channels,), (channels,), (channels,)]
    parameters = [torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes]
    return [x.to(dtype).contiguous(memory_format=random_layout(rng, 4)), *parameters]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _case(rng: random.Random, cut: Sharding) -> None:
    kernel, params, extents = _draw(rng, [[3, 3], [5, 5], [7, 7], [7, 7], [9, 9], [4, 6], [1, 1]], True)
    inputs = _inputs(rng, rng.choice([3, 8, 36]), kernel, extents)
    what = (cut, kernel, params, inputs[0].shape, layout_of(inputs[0]))
    whole = [inputs[0].requires_grad_(), *(_leaf(p) for p in inputs[1:])]
    own = [cut.shard(whole[0]), *(_leaf(p) for p in whole[1:])]
    y = _reference(*whole, params)
    out, convolved, mean, rstd = OPS.depthwise_layer_norm(*own, EPS, False, *params, *cut.cut(whole[0]))
    assert_same(out.detach(), cut.shard(y).detach(), (what, "output"))
    assert convolved.requires_grad and not mean.requires_grad and not rstd.requires_grad
    dy = torch.randn(y.shape, dtype=y.dtype, requires_grad=True)
    dout = cut.shard(dy)
    grads = torch.autograd.grad(y, whole, dy, create_graph=True)
    mine = torch.autograd.grad(out, own, dout, create_graph=True)
    assert_same(mine[0].detach(), cut.shard(grads[0]).detach(), (what, "dx"))
    for i, (share, expected) in enumerate(zip(mine[1:], grads[1:], strict=True)):
        assert_same(total(share), expected.detach(), (what, "parameter", i))
    v = [torch.randn_like(g) for g in grads]
    theirs = torch.autograd.grad(grads, (dy, *whole[:2]), v)
    ours = torch.autograd.grad(mine, (dout, *own[:2]), (cut.shard(v[0]), *v[1:]))
    for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(*((total(a), e) if i == 2 else (a, cut.shard(e))), (what, "second", i), 1e-9)


def _cases(seed: int, num: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for index in range(num):
        ways = shardings((2, 3))
        _case(rng, ways[index % len(ways)])


@pytest.mark.parametrize(("size", "backend"), [(1, "gloo"), (2, "gloo"), (3, "torchtp"), (4, "torchtp")])
def test_output_and_gradients_match_the_whole(size, backend):
    run_ranks(_cases, size, size, 12, backend=backend)


def _pieces(rng: random.Random, cut: Sharding, dtype: torch.dtype, extents: list[int] | None = None) -> None:
    kernel, params, drawn = _draw(rng, [[3, 3], [5, 5], [7, 7], [7, 7], [9, 9], [4, 4], [3, 6]], False)
    if extents:
        kernel, params, drawn = [7, 7], ([1, 1], [3, 3], [1, 1]), extents
    inputs = _inputs(rng, rng.choice([8, 36, 70]), kernel, drawn, dtype)
    what = (cut, kernel, params, inputs[0].shape, dtype)
    x, weight, bias, *factors = inputs
    factors = [f.float() for f in factors]
    middle = F.conv2d(x.double(), weight.double(), bias.double(), *params, x.shape[1]).to(dtype)
    channels_inner = middle.movedim(1, -1).double()
    normed = F.layer_norm(channels_inner, (x.shape[1],), *(f.double() for f in factors), EPS).movedim(-1, 1)
    lists = cut.cut(x)
    own = [cut.shard(x), weight, bias, *factors]
    found = OPS.depthwise_layer_norm_pieces(*own, EPS, True, *params, *lists)
    rounding = ROUNDING[dtype]
    variance, mean = torch.var_mean(channels_inner, -1, correction=0)
    # A rounding of the convolution's output is as large as one of the result, where little is left of the difference.
    for i, (part, expected) in enumerate(zip(found, (normed, middle, mean, (variance + EPS).rsqrt()), strict=True)):
        wanted = cut.shard(expected) if i < 2 else cut.shard(expected.unsqueeze(1)).squeeze(1)
        assert_same(part.double(), wanted.double(), (what, i), rounding if i < 2 else 4 * rounding)
    alone = OPS.depthwise_layer_norm_pieces(*own, EPS, False, *params, *lists)
    assert alone[1].shape == (0,)
    assert_same(alone[0], found[0], (what, "output alone"), 0)


def _pieces_cases(seed: int, num: int, dtypes: list[torch.dtype]) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ways = shardings((2, 3))
    with left_where_they_arrive(ways):
        for index in range(num):
            _pieces(rng, ways[index % len(ways)], dtypes[index % len(dtypes)])
        for extents in ([3, 5], [5, 2]):  # a kernel wider than a shard, and shards without a row
            for way in ways:
                _pieces(rng, way, torch.float32, extents)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 1), ("gloo", 2), ("torchtp", 4)])
def test_halos_are_read_where_they_arrive(backend, size):
    run_ranks(_pieces_cases, size, size, 9, [torch.float32, torch.bfloat16, torch.float16], backend=backend)


def test_the_convolution_is_kept_if_asked_for_or_for_a_gradient():
    rng = random.Random(0)
    inputs = _inputs(rng, 4, [3, 3], [6, 5])
    params = ([1, 1], [1, 1], [1, 1])
    expected = F.conv2d(*inputs[:3], *params, 4)
    assert OPS.depthwise_layer_norm(*inputs, EPS, False, *params, *NO_CUT)[1].shape == (0,)
    assert_same(OPS.depthwise_layer_norm(*inputs, EPS, True, *params, *NO_CUT)[1], expected, "kept")
    wanting = [inputs[0], *(_leaf(p) for p in inputs[1:])]
    kept = OPS.depthwise_layer_norm(*wanting, EPS, False, *params, *NO_CUT)[1]
    assert_same(kept.detach(), expected, "for a gradient")
    kept.square().sum().backward()  # it is a result like the other one
    (dw,) = torch.autograd.grad(F.conv2d(inputs[0], wanting[1], inputs[2], *params, 4).square().sum(), wanting[1])
    assert_same(wanting[1].grad, dw, "gradient through the convolution's output")


def test_torch_func_is_refused_and_leaves_nothing_behind():
    inputs = _inputs(random.Random(0), 4, [3, 3], [6, 5])
    others = (*inputs[1:], EPS, False, [1, 1], [1, 1], [1, 1], *NO_CUT)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: OPS.depthwise_layer_norm(x, *others)[0].sum())(inputs[0])
    assert OPS.depthwise_layer_norm(inputs[0], *others)[1].shape == (0,)  # as before: no graph, nothing kept


@pytest.mark.parametrize("missing", [(2,), (3,), (4,), (2, 3, 4)])
def test_parameters_may_be_missing_and_gradients_unwanted(missing):
    rng = random.Random(1)
    params = ([1, 1], [1, 1], [1, 1])
    drawn = _inputs(rng, 5, [3, 3], [6, 5])
    for wanted in {0, 1, 2, 3, 4} - set(missing):
        mine, theirs = (
            [None if i in missing else t.clone().requires_grad_(i == wanted) for i, t in enumerate(drawn)]
            for _ in range(2)
        )
        found = OPS.depthwise_layer_norm(*mine, EPS, False, *params, *NO_CUT)[0].square().sum()
        expected = _reference(*theirs, params).square().sum()
        (a,), (b,) = torch.autograd.grad(found, mine[wanted]), torch.autograd.grad(expected, theirs[wanted])
        assert_same(a, b, (missing, wanted))


def _opchecks() -> None:
    rng = random.Random(2)
    cut = Sharding((2,), (3,))
    image, *parameters = _inputs(rng, 4, [3, 3], [6, 7])
    for layout in (torch.contiguous_format, torch.channels_last):
        x = image.contiguous(memory_format=layout)
        own = [cut.shard(x).requires_grad_(), *(_leaf(p) for p in parameters)]
        args = (EPS, False, [1, 1], [1, 1], [1, 1], *cut.cut(x))
        torch.library.opcheck(OPS.depthwise_layer_norm.default, (*own, *args))
        torch.library.opcheck(OPS.depthwise_layer_norm.default, (*(t.detach() for t in own), *args))


def test_it_passes_opcheck():
    run_ranks(_opchecks, 2)


def test_what_does_not_fit_is_refused():
    x, weight, row = torch.randn(1, 4, 6, 6), torch.randn(4, 1, 3, 3), torch.randn(4)
    rest = (EPS, False, [1, 1], [1, 1], [1, 1], *NO_CUT)
    for op in (OPS.depthwise_layer_norm, OPS.depthwise_layer_norm_pieces):
        with pytest.raises(ValueError, match=f"{op.__name__}: .*one filter a channel"):
            op(x, torch.randn(4, 2, 3, 3), row, row, row, *rest)
        with pytest.raises(ValueError, match=rf"{op.__name__}: .*\[N, C, H, W\], got 3 dims"):
            op(x[0], weight, row, row, row, *rest)
        for place, name in enumerate(("bias", "norm_weight", "norm_bias")):
            rows = [torch.randn(3) if i == place else row for i in range(3)]
            with pytest.raises(ValueError, match=f"{op.__name__}: {name} has one number for each of 4 channels"):
                op(x, weight, *rows, *rest)
        with pytest.raises(ValueError, match=f"{op.__name__}: stride must be positive"):
            op(x, weight, row, row, row, EPS, False, [0, 0], [1, 1], [1, 1], *NO_CUT)
        with pytest.raises(ValueError, match=f"{op.__name__}: padding needs a number for each of 2"):
            op(x, weight, row, row, row, EPS, False, [1, 1], [1], [1, 1], *NO_CUT)
    with pytest.raises(ValueError, match="stride and dilation of 1"):
        OPS.depthwise_layer_norm_pieces(x, weight, row, row, row, EPS, False, [2, 2], [1, 1], [1, 1], *NO_CUT)
