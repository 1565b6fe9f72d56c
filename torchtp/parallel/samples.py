"""A few elements of a tensor, by which ranks that should hold the same one find out whether they do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchtp.parallel.digest import bytes_of, digest

Samples = list["torch.Tensor | None"]  # one for each tensor, none of what is not compared

_MOST = 4096  # elements of a tensor: some 50 us


def samples_of(tensors: Sequence[torch.Tensor | None], most: int = _MOST) -> Samples:
    """Up to `most` elements of each tensor, of all of its parts, as flat CPU tensors. Waits for devices, once a dtype.

    None of what has no elements to be read one by one: sparse, quantized, nested, of a subclass that computes by itself.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        samples = [_sample(tensor, most) for tensor in tensors]
        away: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, sample in enumerate(samples):
            if sample is not None and sample.device.type != "cpu":
                away.setdefault((sample.device, sample.dtype), []).append(i)
        for places in away.values():
            some = [sample for i in places if (sample := samples[i]) is not None]
            moved = torch.cat(some).cpu().split([sample.numel() for sample in some])
            for i, sample in zip(places, moved, strict=True):
                samples[i] = sample
    return samples


def digest_of(samples: Samples) -> int:
    """63 bits that ranks have alike whose samples are the same to the bit; 0 if there is none."""
    read = [sample for sample in samples if sample is not None]
    return digest(b"\0".join(map(bytes_of, read))) if read else 0


def difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """By how much two samples differ at most, 0 where it may be rounding: ranks may have computed what they hold."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype or one.numel() == 0:
        return 0.0  # shapes and dtypes are agreed on elsewhere
    tolerance = _tolerance(one.dtype)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    apart = (one - other).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    apart[(one == other) | (one.isnan() & other.isnan())] = 0
    finite = one[one.isfinite()].abs()
    most = float(apart.max())
    return most if most > tolerance * (float(finite.max()) if finite.numel() else 0.0) else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    """Of the largest element: far above rounding, far below what two images differ by. Integers are not rounded."""
    return max(1e-4, 4 * torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def _sample(tensor: torch.Tensor | None, most: int) -> torch.Tensor | None:
    if tensor is None or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta" or _is_captured(tensor):
        return None
    sample = tensor.detach()
    for dim, (extent, taken) in enumerate(zip(sample.shape, _taken(sample.shape, most), strict=True)):
        if taken < extent:
            # Odd, so that not every pixel is of one colour or column where channels or rows lie in one dim.
            step = -(-extent // taken) | 1
            sample = sample[(slice(None),) * dim + (slice(step // 2, None, step),)]
    return sample.resolve_conj().resolve_neg().reshape(-1).clone()


def _taken(shape: torch.Size, most: int) -> list[int]:
    """How many of each dim, whatever the order in memory: the longest ones are halved until it is `most` elements or fewer."""
    taken = list(shape)
    while math.prod(taken) > most:
        longest = max(range(len(taken)), key=taken.__getitem__)
        taken[longest] = (taken[longest] + 1) // 2
    return taken


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether work on the tensor's device goes into a graph, in which nothing can be waited for."""
    if not tensor.is_cuda:
        return False
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()
