"""interpolate cut over ranks against F.interpolate on the whole tensor."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from sharding import assert_same, layout_of, random_layout, shardings

from torchtp.testing import RanksFailed, run_ranks

MODES = {
    1: {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "linear"},
    2: {
        "nearest": "nearest",
        "nearest-exact": "nearest-exact",
        "bilinear": "linear",
        "bicubic": "cubic",
        "bilinear antialias": "linear-antialias",
        "bicubic antialias": "cubic-antialias",
    },
    3: {"nearest": "nearest", "nearest-exact": "nearest-exact", "trilinear": "linear"},
}


def draw(rng, dims):
    """A mode of F.interpolate, ours, extents, and either output sizes or scale factors."""
    mode, ours = rng.choice(sorted(MODES[dims].items()))
    extents = [rng.randint(1, (40, 15, 8)[dims - 1]) for _ in range(dims)]
    keywords = {"mode": mode.removesuffix(" antialias")}
    if "antialias" in mode:
        keywords["antialias"] = True
    if "nearest" not in mode:
        keywords["align_corners"] = rng.random() < 0.4
    if rng.random() < 0.5:
        keywords["scale_factor"] = [rng.choice([0.4, 0.5, 0.75, 1.0, 1.3, 2.0, 2.5, 3.7]) for _ in range(dims)]
        sizes = [max(1, int(extent * scale)) for extent, scale in zip(extents, keywords["scale_factor"], strict=True)]
        if any(int(e * s) < 1 for e, s in zip(extents, keywords["scale_factor"], strict=True)):
            return draw(rng, dims)
        scales = keywords["scale_factor"]
    else:
        sizes = keywords["size"] = [rng.choice([1, extent, 2 * extent, rng.randint(1, 40)]) for extent in extents]
        scales = [0.0] * dims
    if "antialias" in mode and sizes[-1] == 1:
        return draw(rng, dims)  # ATen's result depends on the memory layout there: it is no reference
    return mode, ours, extents, keywords, sizes, scales


def interpolations(seed, count, dtype, tolerance):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        dims = (2, 1, 2, 3)[case % 4]
        _, ours, extents, keywords, sizes, scales = draw(rng, dims)
        cut = rng.choice(shardings(range(2, 2 + dims)))
        x = torch.randn(2, 3, *extents, dtype=dtype).contiguous(memory_format=random_layout(rng, 2 + dims))
        x.requires_grad_()
        what = (case, extents, keywords, cut, layout_of(x))
        y = F.interpolate(x, **keywords)
        dy = torch.randn(y.shape, dtype=dtype, requires_grad=True)
        if rng.random() < 0.2:
            dy = torch.ones(1, dtype=dtype).expand(y.shape).requires_grad_()
        part, part_dy = cut.shard(x), cut.shard(dy)
        align = keywords.get("align_corners", False)
        out = torch.ops.torchtp.interpolate(part, ours, sizes, scales, align, *cut.cut(x))
        assert_same(out, cut.shard(y), what, 0 if "nearest" in ours else tolerance)

        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (part_dx,) = torch.autograd.grad(out, part, part_dy, create_graph=True)
        assert_same(part_dx, cut.shard(dx), what, tolerance)
        v = torch.randn(x.shape, dtype=dtype)
        (ddy,) = torch.autograd.grad(dx, dy, v)
        (part_ddy,) = torch.autograd.grad(part_dx, part_dy, cut.shard(v))
        assert_same(part_ddy, cut.shard(ddy), what, tolerance)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_interpolate_and_its_gradients_match_the_whole_tensor(size):
    run_ranks(interpolations, size, size, 120, torch.float64, 1e-10, timeout=240)


def test_single_precision_matches_too():
    run_ranks(interpolations, 2, 7, 60, torch.float32, 1e-5, timeout=120)


def antialiased(seed, count, dtype, tolerance):
    """Mostly shrunk, where the filter reaches over several shards."""
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        mode = ("bilinear", "bicubic")[case % 2]
        extents = [rng.randint(1, 40) for _ in range(2)]
        # From two columns on: with one ATen's result depends on the memory layout, so it is no reference.
        sizes = [max(1, rng.choice([extent // 7, extent // 3, extent, extent * 2 + 1])) for extent in extents]
        sizes[1] = max(2, sizes[1])
        align = rng.random() < 0.3
        x = torch.randn(2, 3, *extents, dtype=dtype).contiguous(memory_format=random_layout(rng, 4)).requires_grad_()
        y = F.interpolate(x, size=sizes, mode=mode, align_corners=align, antialias=True)
        dy = torch.randn(y.shape, dtype=dtype)
        (dx,) = torch.autograd.grad(y, x, dy)
        ours = {"bilinear": "linear", "bicubic": "cubic"}[mode] + "-antialias"
        for cut in shardings([2, 3]):
            part = cut.shard(x)
            out = torch.ops.torchtp.interpolate(part, ours, sizes, [0.0, 0.0], align, *cut.cut(x))
            what = (case, mode, extents, sizes, align, cut, layout_of(x))
            assert_same(out, cut.shard(y), what, tolerance)
            (part_dx,) = torch.autograd.grad(out, part, cut.shard(dy))
            assert_same(part_dx, cut.shard(dx), what, tolerance)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_antialiased_resizing_matches_the_whole_tensor(size):
    run_ranks(antialiased, size, size, 30, torch.float64, 1e-10, timeout=240)


def test_antialiased_resizing_matches_in_single_precision():
    run_ranks(antialiased, 2, 3, 20, torch.float32, 1e-5, timeout=120)


def other_geometries():
    import torchtp  # noqa: F401

    x = torch.randn(1, 1, 2, 60)
    cut = shardings([3])[0]
    for width in (40, 25, 40, 25):
        for mode, ours in (("bilinear", "linear"), ("nearest", "nearest")):
            out = torch.ops.torchtp.interpolate(cut.shard(x), ours, [2, width], [0.0, 0.0], False, *cut.cut(x))
            assert_same(out, cut.shard(F.interpolate(x, size=(2, width), mode=mode)), (mode, width), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_rows_are_those_that_aten_takes_of_small_and_large_images(mode, dtype):
    # Where a coordinate lies half way rounding decides, and ATen rounds otherwise up to 128 rows and columns together.
    for rows, columns in [(24, 33), (6, 26), (2, 26), (31, 17)]:
        x = torch.arange(rows * columns, dtype=dtype).view(1, 1, rows, columns)
        for size in [(37, 50), (41, 55), (74, 22), (64, 64), (64, 65), (120, 40), (1, 127), (2, 127)]:
            found = torch.ops.torchtp.interpolate(x, mode, list(size), [0.0, 0.0], False, [], [], [])
            assert torch.equal(found, F.interpolate(x, size=size, mode=mode)), (rows, columns, size)


def _four_channels_that_come_last(size):
    import torchtp  # noqa: F401

    like = {"dtype": torch.float64, "memory_format": torch.channels_last}
    # Sizes and scales whose rows ATen takes otherwise of four channels that come last than of others.
    for rows, columns, sizes, scales in [(26, 32, [36, 122], [0.0, 0.0]), (64, 80, [64, 160], [1.01, 2.0])]:
        x = torch.arange(4 * rows * columns).view(1, 4, rows, columns).to(**like)
        keywords = {"scale_factor": tuple(scales)} if scales[0] else {"size": tuple(sizes)}
        for cut in shardings([2, 3]):
            out = torch.ops.torchtp.interpolate(cut.shard(x), "nearest", sizes, scales, False, *cut.cut(x))
            assert torch.equal(out, cut.shard(F.interpolate(x, mode="nearest", **keywords))), (rows, cut)


@pytest.mark.parametrize("size", [2, 3])
def test_nearest_rows_of_channels_that_come_last(size):
    run_ranks(_four_channels_that_come_last, size, size)


def test_taps_are_remembered_by_geometry():
    run_ranks(other_geometries, 2)


def _not_a_number(size):
    import torchtp  # noqa: F401

    x = torch.randn(1, 2, 6 * size, 5)
    x[0, 0, 6, 2] = float("nan")
    for sizes in ([6 * size, 5], [6 * size, 10], [12 * size, 5]):
        for cut in shardings([2, 3]):
            out = torch.ops.torchtp.interpolate(cut.shard(x), "linear", sizes, [0.0, 0.0], False, *cut.cut(x))
            expected = cut.shard(F.interpolate(x, size=sizes, mode="bilinear"))
            assert torch.equal(out.isnan(), expected.isnan()), (sizes, cut)


def test_an_extent_that_stays_reads_no_other_row():
    run_ranks(_not_a_number, 2, 2)


def half_precision():
    import torchtp  # noqa: F401

    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(1, 2, 9, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
        for cut in shardings([2, 3]):
            out = torch.ops.torchtp.interpolate(cut.shard(x), "linear", [20, 27], [0.0, 0.0], False, *cut.cut(x))
            expected = cut.shard(F.interpolate(x.float(), size=(20, 27), mode="bilinear"))
            assert out.dtype == dtype
            torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


def test_half_precision_accumulates_in_single():
    run_ranks(half_precision, 2)


def test_the_gradient_of_a_bicubic_image_that_stays_as_large_is_copied():
    x = torch.randn(1, 2, 12, 20, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(1, 2, 12, 20, dtype=torch.float64)
    out = torch.ops.torchtp.interpolate(x, "cubic", [12, 20], [1.05, 1.02], False, [], [], [])
    y = F.interpolate(x, scale_factor=(1.05, 1.02), mode="bicubic")
    torch.testing.assert_close(out, y)
    assert torch.equal(torch.autograd.grad(out, x, dy)[0], torch.autograd.grad(y, x, dy)[0])


def check_op():
    import torchtp  # noqa: F401

    x = torch.randn(1, 2, 9, 13, dtype=torch.float64, requires_grad=True)
    cut = shardings([3])[0]
    part = cut.shard(x)
    args = ("linear", [18, 20], [0.0, 0.0], False, *cut.cut(x))
    torch.library.opcheck(torch.ops.torchtp.interpolate.default, (part, *args))
    dy = torch.ops.torchtp.interpolate(part, *args).detach().requires_grad_()
    torch.library.opcheck(torch.ops.torchtp.interpolate_backward.default, (dy, list(part.shape), *args))


def test_opcheck():
    run_ranks(check_op, 1)


def refuse(mode, sizes):
    import torchtp  # noqa: F401

    x = torch.randn(1, 2, 4, 6)
    cut = shardings([3])[0]
    torch.ops.torchtp.interpolate(cut.shard(x), mode, sizes, [0.0, 0.0], False, *cut.cut(x))


@pytest.mark.parametrize(
    ("mode", "sizes", "message"),
    [("area", [4, 4], "mode is nearest"), ("linear", [4], "needs 2 output sizes"), ("linear", [4, 0], "at least one")],
)
def test_mistakes_raise_on_all_ranks(mode, sizes, message):
    with pytest.raises(RanksFailed, match=message) as error:
        run_ranks(refuse, 2, mode, sizes, timeout=30)
    assert sorted(error.value.failures) == [0, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sizes_and_scales_that_do_not_fit_are_refused(device):
    import torchtp  # noqa: F401

    ops, x = torch.ops.torchtp, torch.randn(1, 2, 4, 6, device=device)
    for scale in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a scale is positive and finite, or 0"):
            ops.interpolate(x, "linear", [8, 8], [scale, 0.0], False, [], [], [])
    for sizes in ([1, 2, 4, 3], [1, 3, 4, 6], [1, 2, 4]):
        grad = torch.randn(sizes, device=device)
        with pytest.raises(ValueError, match=r"sizes of grad_output are \[1, 2, 8, 8\] here, got"):
            ops.interpolate_backward(grad, [1, 2, 4, 6], "linear", [8, 8], [0.0, 0.0], False, [], [], [])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic", "linear-antialias", "cubic-antialias"])
def test_a_scale_of_almost_nothing_reads_no_row_that_is_not_there(mode):
    import torchtp  # noqa: F401

    x = torch.rand(1, 2, 5, 7, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        for scale in (1e-12, 1e-300):
            found = torch.ops.torchtp.interpolate(x.to(dtype), mode, [8, 8], [scale, scale], False, [], [], [])
            if "antialias" not in mode:
                last = x.to(dtype)[..., 4:, 6:].expand(1, 2, 7, 7)
                torch.testing.assert_close(found[..., 1:, 1:], last, msg=f"{dtype}, {scale}")
