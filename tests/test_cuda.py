"""The ops on CUDA tensors, by the kernels, against PyTorch in float64. Skipped without a GPU; FAIL_WITHOUT_CUDA=1 forbids that.

test_device.py runs them on a device that is the CPU in truth (TORCHTP_TEST_DEVICE: its library), on smaller shapes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pretended
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchtp  # noqa: F401

PRETENDED = os.environ.get("TORCHTP_TEST_DEVICE")
if PRETENDED:
    pretended.load(PRETENDED)
DEVICE = pretended.DEVICE if PRETENDED else "cuda"
AVAILABLE = bool(PRETENDED) or torch.cuda.is_available()

pytestmark = pytest.mark.skipif(not AVAILABLE and not os.environ.get("FAIL_WITHOUT_CUDA"), reason="needs a GPU")

OPS = torch.ops.torchtp
NO_CUT: tuple[list[int], list[int], list[str]] = ([], [], [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
WINDOWS = [(kernel, 1, 1) for kernel in (3, 4, 5, 7, 13, 31)] + [(kernel, 2, 1) for kernel in (3, 4, 5, 7)]
WINDOWS += [(3, 1, 2), (4, 1, 2), (9, 1, 2), (5, 1, 3), (7, 1, 3), (9, 2, 1), (31, 2, 1), (3, 2, 2), (7, 2, 2)]
WINDOWS += [(5, 2, 3), (13, 2, 2), (3, 3, 1), (2, 4, 1), (7, 4, 2), (3, 5, 1)]
# Of the largest value: a rounding of the result, and sums in float32.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def random_tensor(*sizes: int, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    out = torch.randn(sizes, dtype=torch.float64).to(dtype)
    return out.contiguous(memory_format=layout) if len(sizes) == 4 else out


def compare(
    op: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    what: object = None,
    strided: bool = False,
) -> None:
    """Outputs and the gradients of all inputs; `strided`: everything lies in memory anyhow."""
    mine = [x.detach().to(DEVICE) for x in inputs]
    mine = [(any_strides(x) if strided else x).requires_grad_() for x in mine]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = op(*mine), reference(*theirs)
    rounding = ROUNDING[inputs[0].dtype]
    assert out.dtype == inputs[0].dtype and out.shape == expected.shape, what
    close(out, expected, rounding, (what, "output"))
    if not expected.numel():
        return
    dy = random_tensor(*expected.shape, dtype=inputs[0].dtype)
    dy = dy.contiguous(memory_format=torch.channels_last) if random.random() < 0.5 and dy.dim() == 4 else dy
    gradient = any_strides(dy.to(DEVICE)) if strided else dy.to(DEVICE)
    found = torch.autograd.grad(out, mine, gradient)
    grads = torch.autograd.grad(expected, theirs, dy.double())
    for i, (a, b) in enumerate(zip(found, grads, strict=True)):
        close(a, b, 2 * rounding, (what, "gradient", i))


def any_strides(x: Tensor) -> Tensor:
    """The same numbers as a view of something larger: transposed, with steps, or off the start of its memory."""
    dims = list(range(x.dim()))
    random.shuffle(dims)
    steps = [random.choice([1, 1, 2]) for _ in dims]
    memory = torch.full([steps[d] * x.size(d) + 1 for d in dims], float("nan"), dtype=x.dtype, device=x.device)
    view = memory.permute([dims.index(d) for d in range(x.dim())])
    for d in range(x.dim()):
        view = view.narrow(d, random.randint(0, 1), steps[d] * x.size(d))
        view = view[(slice(None),) * d + (slice(None, None, steps[d]),)]
    return view.copy_(x)


def close(found: Tensor, expected: Tensor, rounding: float, what: object) -> None:
    if expected.numel():
        error = (found.detach().cpu().double() - expected.detach()).abs().max().item()
        size = expected.detach().abs().max().item()
        assert error <= rounding * max(size, 1e-3), (what, error, size)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kernel", "stride", "dilation"), WINDOWS)
def test_depthwise_convolution(dtype, layout, kernel, stride, dilation):
    for _ in range(4):
        channels = random.choice([1, 3, 5] if PRETENDED else [1, 3, 32, 40])
        most = 20 if PRETENDED else 90
        # An even window is one row larger than its padding.
        extents = [random.randint(1 + dilation * (kernel % 2 == 0), most) for _ in range(2)]
        x = random_tensor(random.randint(1, 3), channels, *extents, dtype=dtype, layout=layout)
        weight, bias = random_tensor(channels, 1, kernel, kernel, dtype=dtype), random_tensor(channels, dtype=dtype)
        two = [stride] * 2, [dilation * (kernel // 2)] * 2, [dilation] * 2
        compare(
            lambda t, w, b, two=two, c=channels: OPS.convolution(t, w, b, *two, False, [0, 0], c, *NO_CUT),
            lambda t, w, b, two=two, c=channels: F.conv2d(t, w, b, *two, c),
            [x, weight, bias],
            (tuple(x.shape), layout),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 8, 96, 257, 1024, 2048, 2500])
def test_layer_norm(dtype, layout, channels):
    if PRETENDED and channels > 2048 and dtype != torch.float32:
        pytest.skip("goes to ATen, whose types differ between the CPU and CUDA")
    for extents in [(8, 12), (5, 7), (1, 1), (0, 3)]:
        x = random_tensor(2, channels, *extents, dtype=dtype, layout=layout) + 1
        weight, bias = (random_tensor(channels, dtype=dtype) for _ in range(2))
        if channels == 1:
            continue  # normed to nothing
        compare(
            lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
            lambda t, w, b, c=channels: F.layer_norm(t.movedim(1, -1), (c,), w, b, 1e-5).movedim(-1, 1),
            [x, weight, bias],
            (extents, layout),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 1), (7, 1), (9, 1), (4, 1), (7, 2)])
def test_depthwise_layer_norm(dtype, layout, kernel, stride):
    for channels, extents in [(8, (9, 21)), (37, (12, 7)), (96, (5, 18)), (130, (8, 8)), (8, (0, 3))]:
        x = random_tensor(2, channels, *extents, dtype=dtype, layout=layout)
        weight = random_tensor(channels, 1, kernel, kernel, dtype=dtype)
        rows = [random_tensor(channels, dtype=dtype) for _ in range(3)]
        params = [stride] * 2, [kernel // 2] * 2, [1, 1]
        if not x.numel() and (kernel % 2 == 0 or stride > 1):
            continue  # would have an output
        compare(
            lambda *t, params=params: OPS.depthwise_layer_norm(*t, 1e-5, False, *params, *NO_CUT)[0],
            lambda *t, params=params: normed_convolution(*t, params),
            [x, weight, *rows],
            (channels, extents, layout),
        )


def normed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Tensor, params: Sequence[list[int]]
) -> Tensor:
    channels = x.shape[1]
    if x.numel() == 0:
        return x
    convolved = F.conv2d(x, weight, bias, *params, channels)
    return F.layer_norm(convolved.movedim(1, -1), (channels,), w, b, 1e-5).movedim(-1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_and_group_norm(dtype, layout):
    for channels, extents in [(4, (8, 12)), (32, (33, 70)), (130, (5, 7)), (8, (200, 300))]:
        x = random_tensor(2, channels, *extents, dtype=dtype, layout=layout) + 1
        weight, bias = (random_tensor(channels, dtype=torch.float32) for _ in range(2))
        compare(
            lambda t, w, b: OPS.batch_norm(t, w, b, None, None, True, 0.1, 1e-5, [])[0],
            lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5),
            [x, weight, bias],
            (channels, extents, layout),
        )
        compare(
            lambda t, w, b: OPS.group_norm(t, w, b, 2, 1e-5, [])[0],
            lambda t, w, b: F.group_norm(t, 2, w, b, 1e-5),
            [x, weight, bias],
            (channels, extents, layout),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("mode", "align"), [("nearest", False), ("bilinear", False), ("bilinear", True), ("bicubic", True)]
)
def test_interpolation(dtype, layout, mode, align):
    ours = {"nearest": "nearest", "bilinear": "linear", "bicubic": "cubic"}[mode]
    for sizes, target in [((6, 8), (12, 16)), ((9, 5), (4, 11)), ((3, 4), (3, 9))]:
        x = random_tensor(2, 8, *sizes, dtype=dtype, layout=layout)
        compare(
            lambda t, target=target: OPS.interpolate(t, ours, list(target), [0.0, 0.0], align, *NO_CUT),
            lambda t, target=target: F.interpolate(t, target, mode=mode, align_corners=align if "bi" in mode else None),
            [x],
            (sizes, target, layout),
        )


def test_interpolation_of_one_and_three_dims():
    for sizes, target, mode in [((9,), (20,), "linear"), ((3, 5, 4), (6, 7, 9), "trilinear")]:
        for layout in [torch.contiguous_format] + [torch.channels_last_3d] * (len(sizes) == 3):
            x = torch.randn(2, 3, *sizes).contiguous(memory_format=layout)
            compare(
                lambda t, target=target: OPS.interpolate(
                    t, "linear", list(target), [0.0] * len(target), False, *NO_CUT
                ),
                lambda t, target=target, mode=mode: F.interpolate(t, target, mode=mode),
                [x],
                (sizes, target, layout),
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_scale(dtype, layout):
    for channels, extents in [(16, (8, 12)), (5, (7, 9)), (3, (0, 4))]:
        residual, branch = (random_tensor(3, channels, *extents, dtype=dtype, layout=layout) for _ in range(2))
        keep = torch.tensor([0.0, 1.25, 1.25])
        compare(
            lambda r, b, g, keep=keep: OPS.layer_scale(r, b, g, keep.to(r.device)),
            lambda r, b, g, keep=keep: r + b * g.view(-1, 1, 1) * keep.view(-1, 1, 1, 1),
            [residual, branch, random_tensor(channels, dtype=torch.float32)],
            (channels, extents, layout),
        )


def depthwise_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels, kernels = random.randint(1, 9), [random.choice([2, 3, 4, 5, 7, 9]) for _ in range(2)]
    dilations = [random.choice([1, 2]) for _ in range(2)]
    extents = [random.randint(d * (kernel - 1) + 1, 20) for d, kernel in zip(dilations, kernels, strict=True)]
    params = random.choice([[1, 1], [2, 2], [2, 1], [3, 4]]), [random.randint(0, 4) for _ in range(2)], dilations
    weight, bias = random_tensor(channels, 1, *kernels, dtype=dtype), random_tensor(channels, dtype=dtype)
    return (
        lambda t, w, b: OPS.convolution(t, w, b, *params, False, [0, 0], channels, *NO_CUT),
        lambda t, w, b: F.conv2d(t, w, b, *params, channels),
        [random_tensor(random.randint(1, 3), channels, *extents, dtype=dtype), weight, bias],
    )


def depthwise_layer_norm_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels, kernel = random.choice([7, 64, 130]), random.choice([3, 4, 7])
    params = [1, 1], [random.randint(0, 4) for _ in range(2)], [1, 1]
    x = random_tensor(2, channels, *(random.randint(kernel, 14) for _ in range(2)), dtype=dtype)
    weight = random_tensor(channels, 1, kernel, kernel, dtype=dtype)
    return (
        lambda *t: OPS.depthwise_layer_norm(*t, 1e-5, False, *params, *NO_CUT)[0],
        lambda *t: normed_convolution(*t, params),
        [x, weight, *(random_tensor(channels, dtype=dtype) for _ in range(3))],
    )


def layer_norm_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels = random.choice([7, 64, 130])  # few would be normed to almost nothing
    x = random_tensor(2, channels, random.randint(1, 9), random.randint(1, 9), dtype=dtype)
    return (
        lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
        lambda t, w, b: F.layer_norm(t.movedim(1, -1), (channels,), w, b, 1e-5).movedim(-1, 1),
        [x, *(random_tensor(channels, dtype=dtype) for _ in range(2))],
    )


def norm_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels = 2 * random.randint(1, 20)
    x = random_tensor(random.randint(1, 3), channels, random.randint(2, 20), random.randint(2, 20), dtype=dtype)
    factors = [random_tensor(channels, dtype=torch.float32) for _ in range(2)]
    if random.random() < 0.5:
        return (
            lambda t, w, b: OPS.group_norm(t, w, b, 2, 1e-5, [])[0],
            lambda t, w, b: F.group_norm(t, 2, w, b, 1e-5),
            [x, *factors],
        )
    return (
        lambda t, w, b: OPS.batch_norm(t, w, b, None, None, True, 0.1, 1e-5, [])[0],
        lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5),
        [x, *factors],
    )


def interpolation_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    sizes, target = ([random.randint(1, 15) for _ in range(2)] for _ in range(2))
    return (
        lambda t: OPS.interpolate(t, "linear", target, [0.0, 0.0], False, *NO_CUT),
        lambda t: F.interpolate(t, target, mode="bilinear"),
        [random_tensor(2, random.randint(1, 9), *sizes, dtype=dtype)],
    )


def layer_scale_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    sizes = [random.randint(1, 9) for _ in range(4)]
    return (
        lambda r, b, g: OPS.layer_scale(r, b, g, None),
        lambda r, b, g: r + b * g.view(-1, 1, 1),
        [*(random_tensor(*sizes, dtype=dtype) for _ in range(2)), random_tensor(sizes[1], dtype=torch.float32)],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [depthwise_case, depthwise_layer_norm_case, layer_norm_case, norm_case, interpolation_case, layer_scale_case],
)
def test_tensors_that_lie_anyhow_in_memory(case, dtype):
    for turn in range(12):
        op, reference, inputs = case(dtype)
        compare(op, reference, inputs, (case.__name__, turn, [tuple(x.shape) for x in inputs]), strided=True)


def test_gradients_that_nobody_wants_are_not_made():
    x, weight, bias = torch.randn(2, 4, 8, 9), torch.randn(4, 1, 3, 3), torch.randn(4)
    numbers = torch.randn(4)
    ops = {
        "convolution": (
            lambda t, w, b: OPS.convolution(t, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 4, *NO_CUT),
            lambda t, w, b: F.conv2d(t, w, b, padding=1, groups=4),
            [x, weight, bias],
        ),
        "layer norm": (
            lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
            lambda t, w, b: F.layer_norm(t.movedim(1, -1), (4,), w, b, 1e-5).movedim(-1, 1),
            [x, numbers, bias],
        ),
        "batch norm": (
            lambda t, w, b: OPS.batch_norm(t, w, b, None, None, True, 0.1, 1e-5, [])[0],
            lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5),
            [x, numbers, bias],
        ),
        "layer scale": (
            lambda r, b, g: OPS.layer_scale(r, b, g, None),
            lambda r, b, g: r + b * g.view(-1, 1, 1),
            [x, x + 1, numbers],
        ),
    }
    for name, (op, reference, inputs) in ops.items():
        for wanted in range(3):
            mine = [t.to(DEVICE).requires_grad_(i == wanted) for i, t in enumerate(inputs)]
            theirs = [t.double().requires_grad_(i == wanted) for i, t in enumerate(inputs)]
            expected = reference(*theirs)
            dy = torch.randn(expected.shape)
            (found,) = torch.autograd.grad(op(*mine), mine[wanted], dy.to(DEVICE))
            (grad,) = torch.autograd.grad(expected, theirs[wanted], dy.double())
            close(found, grad, 4e-5, (name, wanted))


def test_second_derivatives():
    cases = {
        "convolution": (
            lambda t, w: OPS.convolution(t, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 3, *NO_CUT),
            lambda t, w: F.conv2d(t, w, padding=1, groups=3),
            [torch.randn(2, 3, 6, 7), torch.randn(3, 1, 3, 3)],
        ),
        "layer norm": (
            lambda t, w: OPS.layer_norm_channels_first(t, w, None, 1e-5)[0],
            lambda t, w: F.layer_norm(t.movedim(1, -1), (5,), w, None, 1e-5).movedim(-1, 1),
            [torch.randn(2, 5, 3, 4), torch.randn(5)],
        ),
        "depthwise convolution and layer norm": (
            lambda t, w: OPS.depthwise_layer_norm(
                t.contiguous(memory_format=torch.channels_last),
                w,
                None,
                None,
                None,
                1e-5,
                False,
                [1, 1],
                [1, 1],
                [1, 1],
                *NO_CUT,
            )[0],
            lambda t, w: F.layer_norm(F.conv2d(t, w, padding=1, groups=5).movedim(1, -1), (5,)).movedim(-1, 1),
            [torch.randn(2, 5, 6, 7), torch.randn(5, 1, 3, 3)],
        ),
        "group norm": (
            lambda t, w: OPS.group_norm(t, w, None, 2, 1e-5, [])[0],
            lambda t, w: F.group_norm(t, 2, w, None, 1e-5),
            [torch.randn(2, 4, 3, 4), torch.randn(4)],
        ),
        "interpolation": (
            lambda t, w: OPS.interpolate(t, "linear", [7, 9], [0.0, 0.0], False, *NO_CUT) * w,
            lambda t, w: F.interpolate(t, (7, 9), mode="bilinear") * w,
            [torch.randn(2, 3, 4, 5), torch.randn(3, 1, 1)],
        ),
    }
    for name, (op, reference, inputs) in cases.items():
        dy, again = torch.randn(reference(*inputs).shape), torch.randn(inputs[0].shape)

        def second(
            op: Callable[..., Tensor], move: Callable[[Tensor], Tensor], inputs: list[Tensor] = inputs, dy: Tensor = dy,
            again: Tensor = again,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            leaves = [move(x).requires_grad_() for x in inputs]
            (dx,) = torch.autograd.grad(op(*leaves).square(), leaves[0], move(dy), create_graph=True)
            return torch.autograd.grad(dx, leaves, move(again))

        found = second(op, lambda x: x.to(DEVICE))
        expected = second(reference, lambda x: x.double())
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            close(a, b, 1e-4, (name, i))
