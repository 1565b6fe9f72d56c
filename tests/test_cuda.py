"""The ops on CUDA tensors, by the kernels, against PyTorch in float64. Skipped without a GPU; FAIL_WITHOUT_CUDA=1 forbids that.

test_device.py runs them on a device that is the CPU in truth (TORCHTP_TEST_DEVICE: its library), on smaller shapes.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from on_device import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    NO_CUT,
    OPS,
    PRETENDED,
    close,
    compare,
    max_pool,
    normed_convolution,
    random_tensor,
    runs_on_device,
)

pytestmark = runs_on_device

WINDOWS = [(kernel, 1, 1) for kernel in (3, 4, 5, 7, 13, 31)] + [(kernel, 2, 1) for kernel in (3, 4, 5, 7)]
WINDOWS += [(3, 1, 2), (4, 1, 2), (9, 1, 2), (5, 1, 3), (7, 1, 3), (9, 2, 1), (31, 2, 1), (3, 2, 2), (7, 2, 2)]
WINDOWS += [(5, 2, 3), (13, 2, 2), (3, 3, 1), (2, 4, 1), (7, 4, 2), (3, 5, 1)]


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norm_that_has_no_kernel(layout):
    x = random_tensor(2, 6, 5, 7, dtype=torch.float64, layout=layout)
    weight, bias = (random_tensor(6, dtype=torch.float64) for _ in range(2))
    compare(
        lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
        lambda t, w, b: F.layer_norm(t.movedim(1, -1), (6,), w, b, 1e-5).movedim(-1, 1),
        [x, weight, bias],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 1), (7, 1), (9, 1), (4, 1), (7, 2)])
def test_depthwise_layer_norm(dtype, layout, kernel, stride):
    for images, channels, *extents in [(2, 8, 9, 21), (2, 37, 12, 7), (2, 96, 5, 18), (2, 130, 8, 8), (0, 8, 9, 3)]:
        x = random_tensor(images, channels, *extents, dtype=dtype, layout=layout)
        weight = random_tensor(channels, 1, kernel, kernel, dtype=dtype)
        rows = [random_tensor(channels, dtype=dtype) for _ in range(3)]
        params = [stride] * 2, [kernel // 2] * 2, [1, 1]
        compare(
            lambda *t, params=params: OPS.depthwise_layer_norm(*t, 1e-5, False, *params, *NO_CUT)[0],
            lambda *t, params=params: normed_convolution(*t, params),
            [x, weight, *rows],
            (images, channels, extents, layout),
        )


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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_max_pooling(dtype, layout):
    for sizes, window in [
        ((9, 14), (3, 2, 1, 1, False)),
        ((12, 7), (2, 2, 0, 1, False)),
        ((11, 13), ([3, 5], [2, 1], [1, 2], [2, 1], True)),
        ((5, 6), (2, 3, 1, 1, True)),  # rows that no window reads
    ]:
        x = random_tensor(2, 5, *sizes, dtype=dtype, layout=layout)
        compare(max_pool(window, 2), lambda t, w=window: F.max_pool2d(t, *w), [x], (sizes, window, layout))


def test_max_pooling_of_one_and_three_dims():
    compare(max_pool((3, 2, 1, 1, False), 1), lambda t: F.max_pool1d(t, 3, 2, 1), [torch.randn(2, 3, 17)])
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        x = torch.randn(2, 3, 7, 6, 9).contiguous(memory_format=layout)
        compare(max_pool((3, 2, 1, 1, True), 3), lambda t: F.max_pool3d(t, 3, 2, 1, ceil_mode=True), [x], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_max_poolings_gradients(layout):
    """The gradient of dy is read at the maxima."""
    x = random_tensor(2, 5, 9, 14, dtype=torch.float32, layout=layout)

    def gradient(pool):
        def of(t, dy):
            return torch.autograd.grad(pool(t), t, dy, create_graph=True)[0]

        return of

    dy = random_tensor(2, 5, 5, 7, dtype=torch.float32)
    weight = random_tensor(2, 5, 9, 14, dtype=torch.float32)
    found = []
    for pool, device in ((max_pool((3, 2, 1, 1, False), 2), DEVICE), (lambda t: F.max_pool2d(t, 3, 2, 1), "cpu")):
        inputs = [tensor.detach().to(device).requires_grad_() for tensor in (x, dy)]
        (got,) = torch.autograd.grad((gradient(pool)(*inputs) * weight.to(device)).sum(), inputs[1])
        found.append(got)
    close(*found, 1e-6, layout)


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
