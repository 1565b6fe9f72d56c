"""The gradient of depthwise filters on the CPU, as convolutions of cut images take it : as PyTorch's convolution does.

    python -m benchmarks.filter_gradients

One thread of one process, both in turns on the same tensors. "frame" is the number of rows of zeros above and below that
PyTorch is given: the padding that makes an uncut convolution keep its size, or what a shard's own rows need with a halo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchtp  # noqa: F401
from benchmarks.common import Spread, measure, parser, report
from torchtp.host_memory import keep_freed_memory

# Largest difference that may be found, as a share of the largest number: both round sums of as many as 12,544 products.
BOUNDS = {"fp32": 1e-5, "bf16": 2.0**-7}
FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Kernel, stride, channels, height and width, as in MobileNet, EfficientNet, ConvNeXt, RepLKNet.
SHAPES = [
    (3, 1, 96, 112, 112), (3, 1, 576, 14, 14), (3, 2, 96, 112, 112), (5, 1, 240, 28, 28), (5, 2, 144, 56, 56),
    (7, 1, 96, 128, 128), (7, 1, 768, 16, 16), (31, 1, 64, 64, 64),
]  # fmt: skip


def _ways(
    shape: tuple[int, ...], frame: int, dtype: torch.dtype, layout: torch.memory_format
) -> list[Callable[[], Tensor]]:
    kernel, stride, channels, height, width = shape
    padding = [frame, kernel // 2]
    x = torch.randn(1, channels, height, width, dtype=dtype).contiguous(memory_format=layout)
    weight = torch.randn(channels, 1, kernel, kernel, dtype=dtype)
    y = torch.conv2d(x, weight, None, stride, padding, 1, channels)
    dy = torch.randn_like(y)
    steps = ([stride] * 2, padding, [1, 1], False, [0, 0], channels, [False, True, False])
    return [
        lambda: torch.ops.aten.convolution_backward(dy, x, weight, None, *steps)[1],
        lambda: torch.ops.torchtp.convolution_backward(dy, x, weight, *steps, [], [], [])[1],
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    repeat = 3 if args.quick else args.repeat
    rows = []
    for shape in SHAPES[:2] if args.quick else SHAPES:
        kernel, stride, channels, height, width = shape
        for frame in (kernel // 2, kernel - 1):
            for dtype, layout in ((d, f) for d in DTYPES for f in FORMATS):
                atens, ours = _ways(shape, frame, DTYPES[dtype], FORMATS[layout])
                difference = (atens().float() - ours().float()).abs().max() / atens().float().abs().max()
                if not difference <= BOUNDS[dtype]:
                    raise AssertionError(
                        f"{shape}, frame {frame}, {dtype}, channels {layout}: differs by {difference:.1e}"
                    )
                pairs = [(measure(atens, 1, 1)[0], measure(ours, 1, 1)[0]) for _ in range(repeat)]
                row: dict[str, Any] = {"kernel": kernel, "stride": stride, "channels": channels, "height": height}
                row |= {"width": width, "frame": frame, "dtype": dtype, "channels_are": layout}
                row |= {"aten_s": Spread.of([a for a, _ in pairs]), "torchtp_s": Spread.of([b for _, b in pairs])}
                row |= {"ratio": Spread.of([a / b for a, b in pairs]), "largest_difference": float(difference)}
                rows.append(row)
    report(
        "filter_gradients",
        rows,
        {
            "window": lambda row: f"{row['kernel']} x {row['kernel']} / {row['stride']}",
            "image": lambda row: f"{row['channels']} x {row['height']} x {row['width']}",
            "frame": lambda row: str(row["frame"]),
            "dtype": lambda row: row["dtype"],
            "channels": lambda row: row["channels_are"],
            "PyTorch, ms": lambda row: row["aten_s"].text(1e3, 2),
            "torchtp, ms": lambda row: row["torchtp_s"].text(1e3, 2),
            "PyTorch : torchtp": lambda row: row["ratio"].text(),
            "largest difference": lambda row: f"{row['largest_difference']:.0e}",
        },
        args.out,
    )


if __name__ == "__main__":
    main()
