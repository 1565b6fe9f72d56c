"""How halos reach a dense convolution of a part between two others, cut along W, stride 1.

Laid: own columns and halos are copied into one tensor, which cuDNN convolves. Border: cuDNN convolves own columns with
zeros around them, then again, from slabs, what reads halos; backward adds the products of the halos. Alone: without any
halo, the least there is. These are the calls of `csrc/spatial/convolution.cpp` and `border_convolution.cpp`, whose
kLeastBytes is where border becomes the faster one, forward and backward together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.part import no_program
from benchmarks.gpu.timing import Timer

ATEN = torch.ops.aten
# Images, channels, height, width of a part, and the kernel: from U-Net's first level down to ResNet's third stage.
SHAPES = [
    (1, 64, 1080, 1920, 3),
    (1, 64, 540, 960, 3),
    (2, 64, 540, 480, 3),
    (1, 128, 270, 480, 3),
    (2, 256, 135, 240, 3),
    (1, 32, 1080, 1920, 7),
]


def dense(timer: Timer, shape: tuple[int, int, int, int, int], kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of a forward, and of a backward to input and weight, each way."""
    n, c, h, w, kernel = (1, 4, 9, 10, 3) if timer.dry else shape
    depth = kernel // 2

    def image(width: int) -> Tensor:
        return torch.randn(n, c, h, width, device=timer.device).to(dtype, memory_format=torch.channels_last)

    def make() -> dict[str, Tensor]:
        halos = {name: image(depth) for name in ("left", "right", "dleft", "dright")}
        return {"x": image(w), "dy": image(w), **halos}

    weight = torch.randn(c, c, kernel, kernel, device=timer.device).div_(kernel * c**0.5)
    weight = weight.to(dtype, memory_format=torch.channels_last)
    sets = timer.sets(make, 2 * n * c * h * w * dtype.itemsize)
    ways = {"laid": (_laid, _laid_backward), "border": (_border, _border_backward), "alone": (_alone, _alone_backward)}
    _agree(sets[0], weight)

    def taken(run: Callable[[dict[str, Tensor], Tensor], Any]) -> float:
        return timer.seconds([lambda s=s: run(s, weight) for s in sets])  # type: ignore[misc]

    return {
        "kind": "dense convolution",
        "dtype": kind,
        "what": f"{kernel}x{kernel}, {(n, c, h, w)}",
        "bytes": n * c * h * w * dtype.itemsize,
        "ways": {
            name: {"forward": taken(forward), "backward": taken(backward)} for name, (forward, backward) in ways.items()
        },
    }


def _agree(s: dict[str, Tensor], weight: Tensor) -> None:
    # TF32 keeps as many digits of a product's factors as float16.
    bound = 4 * max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float16).eps)
    pairs = [(_laid(s, weight), _border(s, weight))]
    pairs += zip(_laid_backward(s, weight), _border_backward(s, weight), strict=True)
    for found, expected in pairs:
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        if not error <= bound:
            raise AssertionError(f"the ways differ by {error:.1e} of the largest value, more than {bound:.1e}")


def _depth(weight: Tensor) -> int:
    return weight.shape[-1] // 2


def _backward(dy: Tensor, x: Tensor, weight: Tensor, padding: list[int]) -> tuple[Tensor, Tensor]:
    dx, dw, _ = ATEN.convolution_backward(
        dy, x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return dx, dw


def _alone(s: dict[str, Tensor], weight: Tensor) -> Tensor:
    return F.conv2d(s["x"], weight, padding=_depth(weight))


def _alone_backward(s: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(s["dy"], s["x"], weight, [_depth(weight)] * 2)


def _laid(s: dict[str, Tensor], weight: Tensor) -> Tensor:
    return F.conv2d(torch.cat([s["left"], s["x"], s["right"]], 3), weight, padding=(_depth(weight), 0))


def _laid_backward(s: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    depth = _depth(weight)
    return _backward(torch.cat([s["dleft"], s["dy"], s["dright"]], 3), s["x"], weight, [depth, 2 * depth])


def _border(s: dict[str, Tensor], weight: Tensor) -> Tensor:
    depth, x = _depth(weight), s["x"]
    y = _alone(s, weight)
    for side, slab in ((slice(depth), [s["left"], x[..., : 2 * depth]]),
                       (slice(-depth, None), [x[..., -2 * depth :], s["right"]])):  # fmt: skip
        y[..., side].copy_(F.conv2d(torch.cat(slab, 3), weight, padding=(depth, 0)))
    return y


def _border_backward(s: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    depth, x = _depth(weight), s["x"]
    dx, dw = _alone_backward(s, weight)
    dw = dw.float()
    # Zeros make ATen's padding fit, which is the same on both sides (fit_backward in convolution_geometry.cpp).
    for side, grad, zeros in ((slice(depth), s["dleft"], (0, 2 * depth)),
                              (slice(-depth, None), s["dright"], (2 * depth, 0))):  # fmt: skip
        more_dx, more_dw = _backward(F.pad(grad, zeros), x[..., side], weight, [depth, 2 * depth])
        dx[..., side].add_(more_dx)
        dw.add_(more_dw)
    return dx, dw.to(weight.dtype)


if __name__ == "__main__":
    no_program(__doc__, "benchmarks.gpu.kernel_times")
