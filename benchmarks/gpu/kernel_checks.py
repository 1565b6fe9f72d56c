"""Every kernel against plain PyTorch in float64, on random shapes, its outputs poisoned first.

    python -m benchmarks.gpu.kernel_checks [--dry-run]

A row holds the largest error of each result, relative to the result's largest value, and the bound it must keep.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchtp  # noqa: F401
from benchmarks.gpu.part import Part, main
from torchtp import _C
from torchtp.testing import poison_empty

OPS = torch.ops.torchtp
KERNELS = _C.kernels
NO_CUT: tuple[list[int], list[int], list[str]] = ([], [], [])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
# Of the largest value: one rounding of the result and sums in float32.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Kernel, stride, dilation.
WINDOWS = [(7, 1, 1), (3, 1, 1), (5, 1, 1), (3, 2, 1), (5, 2, 1), (7, 2, 1), (13, 1, 1), (31, 1, 1), (4, 1, 1)]
WINDOWS += [(3, 1, 2), (7, 1, 3), (13, 1, 2)]
# Kernel, stride and dilation as numbers of the program.
WINDOWS += [(9, 2, 1), (31, 2, 1), (4, 2, 1), (3, 2, 2), (7, 2, 3), (5, 4, 1)]
Run = Callable[[random.Random, torch.device], dict[str, tuple[Tensor, Tensor]]]


def _draw(rng: random.Random, sizes: Sequence[int], dtype: torch.dtype, layout: Any, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 40))
    out = torch.randn(tuple(sizes), generator=generator).to(device, dtype)
    return out.contiguous(memory_format=layout) if len(sizes) == 4 else out


def _poisoned(sizes: Sequence[int], dtype: torch.dtype, layout: Any, device: torch.device) -> Tensor:
    return torch.full(tuple(sizes), float("nan"), dtype=dtype, device=device).contiguous(memory_format=layout)


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.numel():
        return 0.0
    difference = (found.double() - expected).abs().max().item()
    return difference / max(expected.abs().max().item(), 1e-3) if difference == difference else float("inf")


def _with_gradients(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor], rng: random.Random
) -> dict[str, tuple[Tensor, Tensor]]:
    """Output and the gradients of all inputs of both, by name."""
    mine = [x.detach().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = op(*mine), reference(*theirs)
    pairs = {"output": (out.detach(), expected.detach())}
    if expected.numel():
        dy = _draw(rng, expected.shape, inputs[0].dtype, rng.choice(list(LAYOUTS.values())), out.device)
        found = torch.autograd.grad(out, mine, dy)
        wanted = torch.autograd.grad(expected, theirs, dy.double())
        pairs |= {f"gradient {i}": pair for i, pair in enumerate(zip(found, wanted, strict=True))}
    return pairs


def depthwise(kernel: int, stride: int, dilation: int, dtype: torch.dtype, layout: Any) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        channels = rng.choice([1, 3, 32, 40, 96])
        # An even window is one row larger than its padding.
        sizes = [rng.randint(1, 3), channels, *(rng.randint(1 + dilation * (kernel % 2 == 0), 90) for _ in range(2))]
        # PyTorch's dilated gradients on the CPU, which dry runs take, hold what was in memory before, channels last.
        first = device.type == "cpu" and dilation > 1
        x = _draw(rng, sizes, dtype, torch.contiguous_format if first else layout, device)
        weight = _draw(rng, (channels, 1, kernel, kernel), dtype, torch.contiguous_format, device)
        bias = _draw(rng, (channels,), dtype, None, device)
        two = [stride] * 2, [dilation * (kernel // 2)] * 2, [dilation] * 2
        return _with_gradients(
            lambda t, w, b: OPS.convolution(t, w, b, *two, False, [0, 0], channels, *NO_CUT),
            lambda t, w, b: F.conv2d(t, w, b, *two, channels),
            [x, weight, bias],
            rng,
        )

    return run


def _own(tensor: Tensor, depths: Sequence[int]) -> Tensor:
    """What is left without halos of `depths` above, below, left and right."""
    top, bottom, left, right = depths
    return tensor[:, :, top : tensor.shape[2] - bottom, left : tensor.shape[3] - right]


def _pieces(tensor: Tensor, depths: Sequence[int], layout: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Own rows and columns, and those halos."""
    top, bottom, left, right = depths
    columns = slice(left, tensor.shape[3] - right)
    halos = [
        tensor[:, :, :top, columns] if top else None,
        tensor[:, :, tensor.shape[2] - bottom :, columns] if bottom else None,
        tensor[..., :left] if left else None,
        tensor[..., tensor.shape[3] - right :] if right else None,
    ]
    return _own(tensor, depths).clone(memory_format=layout), [
        None if halo is None else halo.clone(memory_format=layout) for halo in halos
    ]


def depthwise_with_halos(kernel: int, stride: int, dilation: int, dtype: torch.dtype, layout: Any) -> Run:
    """Own rows and columns and what the neighbours sent as separate pieces; interior and border as separate launches."""

    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        reach, channels = dilation * (kernel // 2), rng.choice([3, 32, 40])
        at, steps = (reach, reach), (stride, dilation)
        # Of the output; every one of its rows stands for `stride` rows of the input.
        depths = [rng.choice([0, -(-reach // stride)]) for _ in range(4)]
        height, width = rng.randint(kernel, 60) // stride, rng.randint(kernel, 60) // stride
        sizes = (rng.randint(1, 2), channels, height + sum(depths[:2]), width + sum(depths[2:]))
        in_depths, in_sizes = [stride * depth for depth in depths], (*sizes[:2], *(stride * size for size in sizes[2:]))
        full, full_dy = _draw(rng, in_sizes, dtype, layout, device), _draw(rng, sizes, dtype, layout, device)
        weight = _draw(rng, (channels, 1, kernel, kernel), dtype, torch.contiguous_format, device)
        bias = _draw(rng, (channels,), dtype, None, device)

        (x, halos), (dy, dy_halos) = _pieces(full, in_depths, layout), _pieces(full_dy, depths, layout)
        out, dx = (_poisoned(own.shape, dtype, layout, device) for own in (dy, x))
        dw = _poisoned(weight.shape, dtype, torch.contiguous_format, device)
        for part in ("interior", "border"):
            KERNELS.depthwise(x, halos, weight, bias, out, at, *steps, part)
            KERNELS.depthwise_input_grad(dy, dy_halos, weight, dx, at, *steps, part)
        KERNELS.depthwise_weight_grad(x, dy, dy_halos, dw, at, *steps)
        wide_x = full.double().requires_grad_()
        wide_w = weight.double().requires_grad_()
        expected = F.conv2d(wide_x, wide_w, bias.double(), stride, reach, dilation, channels)
        (dx_all,) = torch.autograd.grad(expected, wide_x, full_dy.double(), retain_graph=True)
        # Products of own inputs only: this rank's share.
        mine = torch.zeros_like(full, dtype=torch.float64)
        _own(mine, in_depths).copy_(_own(full, in_depths))
        shares = F.conv2d(mine, wide_w, None, stride, reach, dilation, channels)
        (dw_all,) = torch.autograd.grad(shares, wide_w, full_dy.double())
        return {
            "output": (out, _own(expected, depths).detach()),
            "input": (dx, _own(dx_all, in_depths)),
            "weight": (dw, dw_all),
        }

    return run


def depthwise_layer_norm(kernel: int, channels: int, dtype: torch.dtype, layout: Any) -> Run:
    """The op on whole images; and the kernel with halos, interior and border as separate launches."""

    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        reach = kernel // 2
        depths = [rng.choice([0, reach]) for _ in range(4)]
        height, width = rng.randint(kernel, 40), rng.randint(kernel, 40)
        sizes = (rng.randint(1, 2), channels, height + sum(depths[:2]), width + sum(depths[2:]))
        full = _draw(rng, sizes, dtype, layout, device)
        weight = _draw(rng, (channels, 1, kernel, kernel), dtype, torch.contiguous_format, device)
        bias, w, b = (_draw(rng, (channels,), dtype, None, device) for _ in range(3))
        params = [1, 1], [reach, reach], [1, 1]

        def reference(x: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Tensor) -> Tensor:
            convolved = F.conv2d(x, weight, bias, *params, channels).movedim(1, -1)
            return F.layer_norm(convolved, (channels,), w, b, 1e-5).movedim(-1, 1)

        pairs = _with_gradients(
            lambda *inputs: OPS.depthwise_layer_norm(*inputs, 1e-5, False, *params, *NO_CUT)[0],
            reference,
            [full, weight, bias, w, b],
            rng,
        )
        x, halos = _pieces(full, depths, layout)
        out, convolved = (_poisoned(x.shape, dtype, layout, device) for _ in range(2))
        mean, rstd = (torch.full((x.shape[0], height, width), float("nan"), device=device) for _ in range(2))
        outputs, factors = (out, convolved, mean, rstd), (w.float(), b.float())
        for part in ("interior", "border"):
            KERNELS.depthwise_layer_norm(x, halos, weight, bias, factors, 1e-5, outputs, (reach, reach), part)
        wide = [t.double() for t in (full, weight, bias, w, b)]
        pairs["with halos"] = (out, _own(reference(*wide), depths))
        pairs["convolution"] = (convolved, _own(F.conv2d(*wide[:3], *params, channels), depths))
        return pairs

    return run


def layer_norm(channels: int, dtype: torch.dtype, layout: Any) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        sizes = (2, channels, rng.randint(1, 40), rng.randint(1, 40))
        x = _draw(rng, sizes, dtype, layout, device) + 1
        weight, bias = (_draw(rng, (channels,), dtype, None, device) for _ in range(2))
        return _with_gradients(
            lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
            lambda t, w, b: F.layer_norm(t.movedim(1, -1), (channels,), w, b, 1e-5).movedim(-1, 1),
            [x, weight, bias],
            rng,
        )

    return run


def norm(kind: str, dtype: torch.dtype, layout: Any) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        channels = rng.choice([4, 32, 130])
        x = _draw(rng, (2, channels, rng.randint(2, 120), rng.randint(2, 120)), dtype, layout, device) + 1
        weight, bias = (_draw(rng, (channels,), torch.float32, None, device) for _ in range(2))
        if kind == "batch":
            return _with_gradients(
                lambda t, w, b: OPS.batch_norm(t, w, b, None, None, True, 0.1, 1e-5, [])[0],
                lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5),
                [x, weight, bias],
                rng,
            )
        return _with_gradients(
            lambda t, w, b: OPS.group_norm(t, w, b, 2, 1e-5, [])[0],
            lambda t, w, b: F.group_norm(t, 2, w, b, 1e-5),
            [x, weight, bias],
            rng,
        )

    return run


def interpolation(mode: str, dtype: torch.dtype, layout: Any) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        sizes, target = ([rng.randint(1, 40) for _ in range(2)] for _ in range(2))
        align = mode != "nearest" and rng.random() < 0.5
        name = {"nearest": "nearest", "bilinear": "linear", "bicubic": "cubic"}[mode]

        def reference(t: Tensor) -> Tensor:
            if mode != "nearest":
                return F.interpolate(t, target, mode=mode, align_corners=align)
            # PyTorch's own backward of this mode rounds coordinates otherwise than its forward.
            pixels = torch.arange(sizes[0] * sizes[1], dtype=t.dtype, device=t.device).view(1, 1, *sizes)
            taken = F.interpolate(pixels, target, mode=mode).long().flatten()
            return t.flatten(2)[:, :, taken].unflatten(2, target)

        return _with_gradients(
            lambda t: OPS.interpolate(t, name, target, [0.0, 0.0], align, *NO_CUT),
            reference,
            [_draw(rng, (2, rng.choice([3, 8, 32]), *sizes), dtype, layout, device)],
            rng,
        )

    return run


def max_pooling(dtype: torch.dtype, layout: Any) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        kernel, stride, dilation = rng.randint(2, 4), rng.randint(1, 4), rng.randint(1, 2)
        window = [kernel] * 2, [stride] * 2, [rng.randint(0, kernel // 2)] * 2, [dilation] * 2, rng.random() < 0.5
        sizes = (2, rng.choice([3, 8, 32]), *(rng.randint(dilation * (kernel - 1) + 1, 50) for _ in range(2)))
        return _with_gradients(
            lambda t: OPS.max_pool(t, *window, *NO_CUT)[0],
            lambda t: F.max_pool2d(t, *window),
            [_draw(rng, sizes, dtype, layout, device)],
            rng,
        )

    return run


def layer_scale(dtype: torch.dtype, layout: Any) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        sizes = (3, rng.choice([5, 16, 96]), rng.randint(1, 50), rng.randint(1, 50))
        residual, branch = (_draw(rng, sizes, dtype, layout, device) for _ in range(2))
        keep = torch.tensor([0.0, 1.25, 1.25], device=device)
        return _with_gradients(
            lambda r, b, g: OPS.layer_scale(r, b, g, keep),
            lambda r, b, g: r + b * g.view(-1, 1, 1) * keep.view(-1, 1, 1, 1),
            [residual, branch, _draw(rng, (sizes[1],), torch.float32, None, device)],
            rng,
        )

    return run


def halo_pack(dtype: torch.dtype) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        sizes, dim = [rng.randint(1, 40) for _ in range(4)], rng.randrange(4)
        depths = tuple(rng.randint(0, sizes[dim]) for _ in range(2))
        starts = tuple(rng.randint(0, sizes[dim] - depth) for depth in depths)
        x = _draw(rng, sizes, dtype, torch.contiguous_format, device)
        slabs = [x.narrow(dim, start, depth) for start, depth in zip(starts, depths, strict=True)]
        expected = torch.cat([slab.reshape(-1) for slab in slabs])
        packed = torch.full_like(expected, float("nan"))
        KERNELS.halo_pack(x, packed, dim, starts, depths)
        # Slabs that overlap would be written twice, in any order.
        back, wanted = torch.zeros_like(x), torch.zeros_like(x)
        KERNELS.halo_unpack(expected[: slabs[0].numel()], back, dim, (starts[0], 0), (depths[0], 0))
        wanted.narrow(dim, starts[0], depths[0]).copy_(slabs[0])
        return {"packed": (packed, expected.double()), "unpacked": (back, wanted.double())}

    return run


def bucket(dtype: torch.dtype, flat_type: torch.dtype) -> Run:
    def run(rng: random.Random, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        counts = [rng.choice([0, 1, 7, 64, rng.randint(1, 30000)]) for _ in range(rng.choice([5, 600]))]
        tensors = [_draw(rng, (count,), dtype, None, device) for count in counts]
        expected = torch.cat(tensors).double()
        flat = torch.full((sum(counts),), float("nan"), dtype=flat_type, device=device)
        KERNELS.bucket_pack(tensors, flat, 0.5)
        back = [torch.full_like(tensor, float("nan")) for tensor in tensors]
        KERNELS.bucket_unpack(flat, back, 2.0)
        pairs = {"packed": (flat, expected / 2), "unpacked": (torch.cat(back), flat.double() * 2)}
        if flat.numel():
            length = flat.double().norm()
            pairs["norm"] = (KERNELS.bucket_clip(flat, 1.0)[0], length)
            pairs["factor"] = (KERNELS.bucket_clip(flat, 1.0)[1], (1 / (length + 1e-6)).clamp(max=1))
        return pairs

    return run


def cases() -> Iterator[tuple[str, torch.dtype, Run]]:
    for type_name, dtype in DTYPES.items():
        for layout_name, layout in LAYOUTS.items():
            where = f"{type_name} {layout_name}"
            for window in WINDOWS:
                kernel, stride, dilation = window
                name = f"depthwise {kernel}x{kernel}, stride {stride}, dilation {dilation}"
                yield f"{name}, {where}", dtype, depthwise(*window, dtype, layout)
                if kernel not in (4, 31):
                    yield f"{name}, with halos, {where}", dtype, depthwise_with_halos(*window, dtype, layout)
            for channels in (8, 96, 257, 1024, 2048):
                yield f"layer norm over {channels}, {where}", dtype, layer_norm(channels, dtype, layout)
            for kernel, channels in [(7, 96), (7, 1024), (3, 257), (5, 32), (13, 40)]:
                name = f"depthwise {kernel}x{kernel} and layer norm over {channels}, {where}"
                yield name, dtype, depthwise_layer_norm(kernel, channels, dtype, layout)
            for kind in ("batch", "group"):
                yield f"{kind} norm, {where}", dtype, norm(kind, dtype, layout)
            for mode in ("nearest", "bilinear", "bicubic"):
                yield f"{mode} interpolation, {where}", dtype, interpolation(mode, dtype, layout)
            yield f"max pooling, {where}", dtype, max_pooling(dtype, layout)
            yield f"layer scale, {where}", dtype, layer_scale(dtype, layout)
        yield f"halo pack, {type_name}", dtype, halo_pack(dtype)
    pairs = {"fp32 to fp32": (torch.float32,) * 2, "fp32 to bf16": (torch.float32, torch.bfloat16)}
    pairs |= {"fp32 to fp16": (torch.float32, torch.float16), "bf16 to fp32": (torch.bfloat16, torch.float32)}
    for name, (dtype, flat_type) in pairs.items():
        yield f"bucket pack, {name}", min(dtype, flat_type, key=lambda t: t.itemsize), bucket(dtype, flat_type)


def check(run: Run, dtype: torch.dtype, times: int, device: torch.device) -> dict[str, Any]:
    """The largest errors of several random draws; raises where one is over its bound."""
    errors: dict[str, float] = {}
    seed = random.SystemRandom().randrange(1 << 30)
    for turn in range(times):
        for name, (found, expected) in run(random.Random(seed + turn), device).items():
            errors[name] = max(errors.get(name, 0.0), _error(found, expected))
    bounds = {name: ROUNDING[dtype] * (2 if name.startswith("gradient") else 1) for name in errors}
    wrong = [name for name, error in errors.items() if not error <= bounds[name]]
    row = {"errors": errors, "bounds": bounds, "seed": seed, "draws": times}
    if wrong:
        raise AssertionError(f"{', '.join(wrong)} too far from float64: {row}")
    return row


def run(part: Part, options: argparse.Namespace) -> None:
    poison_empty()
    few = part.dry or options.small
    for number, (name, dtype, one) in enumerate(cases()):
        # The largest kernels' programs take seconds where blocks run one after the other, or are watched.
        if few and (number % 7 != 3 or "31x31" in name):
            continue
        part.case(
            name,
            lambda one=one, dtype=dtype: check(one, dtype, 1 if few else 3, part.device),  # type: ignore[misc]
            seconds=20,
        )


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="a seventh of the cases, one draw of each")


if __name__ == "__main__":
    main(__doc__, run, flags)
