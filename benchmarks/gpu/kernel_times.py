"""Each kernel beside what PyTorch does for the same work, on one rank, with real data in the halos.

    python -m benchmarks.gpu.kernel_times [--dry-run]

Medians of replayed graphs of calls; inputs are taken in turn so that the cache does not hold them. Rows hold seconds;
bytes are what has to be moved at least, flop what has to be computed. What could not be captured says so (by_events).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchtp  # noqa: F401
from benchmarks.gpu.dense_times import SHAPES, dense
from benchmarks.gpu.move_times import bucket, copies, halo_pack
from benchmarks.gpu.part import Part, main
from benchmarks.gpu.timing import Timer
from torchtp import _C

OPS = torch.ops.torchtp
KERNELS = _C.kernels
ATEN = torch.ops.aten
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
# The depthwise convolutions of ConvNeXt-XL on (7, 3, 512, 1024), stage by stage.
STAGES = [(7, 256, 128, 256), (7, 512, 64, 128), (7, 1024, 32, 64), (7, 2048, 16, 32)]
REACH = 3


def _shape(timer: Timer, stage: int) -> tuple[int, int, int, int]:
    return (1, 8, 9, 10) if timer.dry else STAGES[stage]


def depthwise(timer: Timer, stage: int, kind: str) -> dict[str, Any]:
    """7x7: forward, gradient of the input, of the filters; without a halo, and with one on all four sides."""
    n, c, h, w = _shape(timer, stage)
    row: dict[str, Any] = {"kind": "depthwise", "stage": stage + 1, "dtype": kind, "shape": [n, c, h, w]}
    row["flop_a_pass"] = 2 * 49 * n * c * h * w
    row["bytes_a_pass"] = 2 * n * c * h * w * DTYPES[kind].itemsize
    row["ours"], row["with_halos"], row["theirs"] = {}, {}, {}
    for name, layout in LAYOUTS.items():
        found = _depthwise(timer, (n, c, h, w), DTYPES[kind], layout)
        row["ours"][name], row["with_halos"][name], row["theirs"][name] = found
    return row


def _depthwise(
    timer: Timer, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: torch.memory_format
) -> list[dict[str, float]]:
    """Without halos, with them, and PyTorch's, in one layout."""
    n, c, h, w = shape
    at, params = (REACH, REACH), ([1, 1], [REACH, REACH], [1, 1], False, [0, 0], c)

    def image(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=timer.device).to(dtype).contiguous(memory_format=layout)

    def make() -> dict[str, Any]:
        rows, columns = (n, c, REACH, w), (n, c, h + 2 * REACH, REACH)
        halos = [image(*rows), image(*rows), image(*columns), image(*columns)]
        return {"x": image(*shape), "dy": image(*shape), "out": image(*shape), "halos": halos, "none": []}

    sets = timer.sets(make, 3 * n * c * h * w * dtype.itemsize)
    weight = torch.randn(c, 1, 7, 7, device=timer.device).to(dtype)
    bias = torch.randn(c, device=timer.device).to(dtype)
    filters, dw = weight.contiguous(memory_format=layout), torch.empty_like(weight)

    def taken(run: Callable[[dict[str, Any]], Any]) -> float:
        return timer.seconds([lambda s=s: run(s) for s in sets])  # type: ignore[misc]

    def ours(halos: str) -> dict[str, float]:
        return {
            "forward": taken(lambda s: KERNELS.depthwise(s["x"], s[halos], weight, bias, s["out"], at)),
            "input": taken(lambda s: KERNELS.depthwise_input_grad(s["dy"], s[halos], weight, s["out"], at)),
            "weight": taken(lambda s: KERNELS.depthwise_weight_grad(s["x"], s["dy"], s[halos], dw, at)),
        }

    def in_parts(s: dict[str, Any]) -> None:
        for which in ("interior", "border"):
            KERNELS.depthwise(s["x"], s["halos"], weight, bias, s["out"], at, part=which)

    def backward(s: dict[str, Any], mask: list[bool]) -> Any:
        return ATEN.convolution_backward(s["dy"], s["x"], filters, None, *params, mask)

    theirs = {
        "forward": taken(lambda s: F.conv2d(s["x"], filters, bias, padding=REACH, groups=c)),
        "input": taken(lambda s: backward(s, [True, False, False])),
        "weight": taken(lambda s: backward(s, [False, True, False])),
        # What a cut convolution costs that first brings its halo into one tensor.
        "forward after cat": taken(lambda s: F.conv2d(_joined(s["x"], s["halos"]), filters, bias, groups=c)),
    }
    return [ours("none"), ours("halos") | {"forward, interior then border": taken(in_parts)}, theirs]


def _joined(x: Tensor, halos: list[Tensor]) -> Tensor:
    return torch.cat([halos[2], torch.cat([halos[0], x, halos[1]], 2), halos[3]], 3)


def _both(
    timer: Timer, run: Callable[..., Tensor], make: Callable[[], list[Tensor]], num_bytes: int
) -> dict[str, float]:
    """Forward and backward of `run`, whose inputs all want a gradient."""
    forward, backward = [], []
    for inputs in timer.sets(make, num_bytes):
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = run(*leaves)
        dy = torch.randn_like(out)
        wanted = [x for x in leaves if x.requires_grad]
        forward.append(lambda leaves=leaves: run(*leaves))
        backward.append(lambda out=out, wanted=wanted, dy=dy: torch.autograd.grad(out, wanted, dy, retain_graph=True))
    return {"forward": timer.seconds(forward), "backward": timer.seconds(backward)}


def layer_norm(timer: Timer, stage: int, kind: str) -> dict[str, Any]:
    """Over C; ours in both layouts, theirs by F.layer_norm on the permuted tensor and written out."""
    shape, dtype, device = _shape(timer, stage), DTYPES[kind], timer.device
    c, numel = shape[1], torch.Size(shape).numel()
    row: dict[str, Any] = {"kind": "layer norm", "stage": stage + 1, "dtype": kind, "shape": list(shape)}
    row |= {"bytes": {"forward": 2 * numel * dtype.itemsize, "backward": 3 * numel * dtype.itemsize}}
    row["ours"], row["theirs"], row["copy"] = {}, {}, copies(timer, row["bytes"])

    def fused(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), (c,), w, b, 1e-6).permute(0, 3, 1, 2)

    def written_out(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return w[:, None, None] * (centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6)) + b[:, None, None]

    for name, layout in LAYOUTS.items():

        def make(layout: Any = layout) -> list[Tensor]:
            x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout)
            return [x, torch.randn(c, device=device).to(dtype), torch.randn(c, device=device).to(dtype)]

        num_bytes = 3 * numel * dtype.itemsize
        row["ours"][name] = _both(
            timer, lambda x, w, b: OPS.layer_norm_channels_first(x, w, b, 1e-6)[0], make, num_bytes
        )
        row["theirs"][name] = _both(timer, fused, make, num_bytes)
        if name == "channels first":
            row["theirs"][f"{name}, written out"] = _both(timer, written_out, make, num_bytes)
    return row


def depthwise_layer_norm(timer: Timer, stage: int, kind: str, layout: str) -> dict[str, Any]:
    """7x7 and the norm over C behind it: by the op, which launches two kernels; by the one launch; and PyTorch's."""
    shape, dtype, device = _shape(timer, stage), DTYPES[kind], timer.device
    c, numel = shape[1], torch.Size(shape).numel()
    at: tuple[list[int], list[int], list[int]] = ([1, 1], [REACH, REACH], [1, 1])

    def one_launch(x: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Tensor) -> Any:
        return OPS.depthwise_layer_norm_pieces(x, weight, bias, w, b, 1e-6, True, *at, [], [], [])

    def theirs(x: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Tensor) -> Tensor:
        convolved = F.conv2d(x, weight, bias, padding=REACH, groups=c)
        return F.layer_norm(convolved.permute(0, 2, 3, 1), (c,), w, b, 1e-6).permute(0, 3, 1, 2)

    def make() -> list[Tensor]:
        x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=LAYOUTS[layout])
        return [x, *(torch.randn(size, device=device).to(dtype) for size in ((c, 1, 7, 7), (c,), (c,), (c,)))]

    num_bytes, access = 3 * numel * dtype.itemsize, numel * dtype.itemsize
    try:
        launched = {"forward": timer.seconds([lambda s=s: one_launch(*s) for s in timer.sets(make, num_bytes)])}  # type: ignore[misc]
    except ValueError:  # a block has no room for so many channels
        launched = {}
    return {
        "kind": "depthwise layer norm",
        "layout": layout,
        "stage": stage + 1,
        "dtype": kind,
        "shape": list(shape),
        "flop": {"forward": 98 * numel, "backward": 196 * numel},
        # Forward: in, the convolution's output for backward, out. Backward: 3 of the norm, 2 for each gradient.
        "bytes": {"forward": 3 * access, "backward": 7 * access},
        "ours": _both(
            timer,
            lambda x, weight, bias, w, b: OPS.depthwise_layer_norm(x, weight, bias, w, b, 1e-6, False, *at, [], [], [])[
                0
            ],
            make,
            num_bytes,
        ),
        "one_launch": launched,
        "theirs": _both(timer, theirs, make, num_bytes),
    }


# Windows that are not ConvNeXt's: kernel, stride, dilation; accesses of an input in forward and backward.
WINDOWS = {
    "depthwise 3x3": (3, 1, 1, 2, 4),
    "depthwise 5x5": (5, 1, 1, 2, 4),
    "depthwise 3x3, stride 2": (3, 2, 1, 1.25, 2.5),
    "depthwise 5x5, stride 2": (5, 2, 1, 1.25, 2.5),
    "depthwise 7x7, stride 2": (7, 2, 1, 1.25, 2.5),
    "depthwise 13x13, stride 2": (13, 2, 1, 1.25, 2.5),
    "depthwise 3x3, dilation 2": (3, 1, 2, 2, 4),
    "depthwise 7x7, dilation 3": (7, 1, 3, 2, 4),
}


def _op(timer: Timer, name: str, kind: str, layout_name: str) -> dict[str, Any]:
    """The ops whose ceiling is copying, on (7, 256, 128, 256) or what they make of it."""
    shape, dtype, device, layout = _shape(timer, 0), DTYPES[kind], timer.device, LAYOUTS[layout_name]
    c, numel = shape[1], torch.Size(shape).numel()

    def image(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).to(dtype).contiguous(memory_format=layout)

    def numbers() -> Tensor:
        return torch.randn(c, device=device)

    small = (shape[0], c, shape[2] // 2, shape[3] // 2)
    target = list(shape[2:])
    pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[[], list[Tensor]], float, float]] = {
        "batch norm": (
            lambda x, w, b: OPS.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, [])[0],
            lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5),
            lambda: [image(*shape), numbers(), numbers()],
            3,
            5,
        ),
        "group norm": (
            lambda x, w, b: OPS.group_norm(x, w.to(dtype), b.to(dtype), 4, 1e-5, [])[0],
            lambda x, w, b: F.group_norm(x, 4, w.to(dtype), b.to(dtype), 1e-5),
            lambda: [image(*shape), numbers(), numbers()],
            3,
            5,
        ),
        "bilinear interpolation": (
            lambda x: OPS.interpolate(x, "linear", target, [0.0, 0.0], False, [], [], []),
            lambda x: F.interpolate(x, target, mode="bilinear"),
            lambda: [image(*small)],
            1.25,
            1.25,
        ),
        "nearest interpolation": (
            lambda x: OPS.interpolate(x, "nearest", target, [0.0, 0.0], False, [], [], []),
            lambda x: F.interpolate(x, target, mode="nearest"),
            lambda: [image(*small)],
            1.25,
            1.25,
        ),
        "max pooling": (
            lambda x: OPS.max_pool(x, [3, 3], [2, 2], [1, 1], [1, 1], False, [], [], [])[0],
            lambda x: F.max_pool2d(x, 3, 2, 1),
            lambda: [image(*shape)],
            1.25 + 2 / dtype.itemsize,  # indices of 8 bytes, a quarter as many
            1.25 + 2 / dtype.itemsize,
        ),
        "layer scale": (
            lambda r, b, g: OPS.layer_scale(r, b, g, None),
            lambda r, b, g: r + b * g.to(dtype)[:, None, None],
            lambda: [image(*shape), image(*shape), numbers()],
            3,
            3,
        ),
    }
    for what, (kernel, stride, dilation, forward, backward) in WINDOWS.items():
        at = [stride] * 2, [kernel // 2 * dilation] * 2, [dilation] * 2
        pairs[what] = (
            lambda x, w, at=at: OPS.convolution(x, w, None, *at, False, [0, 0], c, [], [], []),  # type: ignore[misc]
            lambda x, w, at=at: F.conv2d(x, w, None, *at, c),  # type: ignore[misc]
            lambda kernel=kernel: [image(*shape), torch.randn(c, 1, kernel, kernel, device=device).to(dtype)],  # type: ignore[misc]
            forward,
            backward,
        )
    ours, theirs, make, forward, backward = pairs[name]
    num_bytes = 3 * numel * dtype.itemsize
    least = {"forward": forward * numel * dtype.itemsize, "backward": backward * numel * dtype.itemsize}
    return {
        "kind": "op",
        "what": f"{name}, {kind} {layout_name}",
        "bytes": least,
        "copy": copies(timer, least),
        "ours": _both(timer, ours, make, num_bytes),
        "theirs": _both(timer, theirs, make, num_bytes),
    }


def run(part: Part, options: argparse.Namespace) -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    timer = Timer(part.device)

    def case(name: str, measure: Callable[..., dict[str, Any]], *args: Any) -> None:
        part.case(name, lambda: timer.row(measure, *args))

    stages = range(1 if part.dry else len(STAGES))
    for kind in DTYPES:
        for stage in stages:
            case(f"depthwise, stage {stage + 1}, {kind}", depthwise, stage, kind)
    for kind in DTYPES:
        for stage in stages:
            case(f"layer norm, stage {stage + 1}, {kind}", layer_norm, stage, kind)
    for kind in DTYPES:
        for stage in stages:
            for layout in LAYOUTS:
                what = f"depthwise and layer norm, stage {stage + 1}, {kind}, {layout}"
                case(what, depthwise_layer_norm, stage, kind, layout)
    first = _shape(timer, 0)
    n, c, h, w = first
    halos = [("3 columns, channels first", first, 3, 3), ("3 rows, channels first", first, 2, 3)]
    halos += [("3 columns, channels last", (n, h, w, c), 2, 3), ("3 rows, channels last", (n, h, w, c), 1, 3)]
    halos += [("3 rows of a small one", (1, h, 16, 32), 1, 3), ("a quarter of the rows", first, 2, h // 4)]
    for name, shape, dim, depth in halos:
        case(f"halo pack, {name}", halo_pack, name, shape, dim, depth)
    for kind in DTYPES:
        case(f"bucket pack to {kind}", bucket, kind)
    for shape in SHAPES[: 1 if part.dry else None]:
        for kind, dtype in DTYPES.items():
            case(f"dense convolution, {shape}, {kind}", dense, shape, kind, dtype)
    copying = ("batch norm", "group norm", "bilinear interpolation", "nearest interpolation")
    for name in (*copying, "max pooling", "layer scale", *WINDOWS):
        for layout in LAYOUTS:
            case(f"{name}, bf16 {layout}", _op, name, "bf16", layout)


if __name__ == "__main__":
    main(__doc__, run)
