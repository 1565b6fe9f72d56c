"""Complex numbers, bytes, infinities: rules that real floating numbers are not enough to test."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout

from torchtp.testing import run_ranks


def _complex(*shape):
    return torch.randn(shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(3))


def _real(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def _bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(6))


def _with_infinity(value):
    image = _real(2, 3, 7, 10)
    image[0, 1, 3, 4] = value
    return image


def _whole(x):
    return (x[0, 0].detach() * 2**30).long()


def _counts(x):
    picked = x[0, 0, 0, :4]
    return torch.bincount(picked.long() % 3, weights=picked.float())


# A function of an image and a weight, and both.
CASES = {
    "linear": (lambda x, w: F.linear(x, w), _complex(2, 3, 7, 10).movedim(1, -1), _complex(4, 3)),
    "matmul": (lambda x, w: torch.matmul(x, w.t()), _complex(2, 3, 7, 10).movedim(1, -1), _complex(4, 3)),
    "linear, real image": (lambda x, w: F.linear(x.to(w.dtype), w), _real(2, 3, 7, 10).movedim(1, -1), _complex(4, 3)),
    "norm": (lambda x, w: x.norm(dim=1) * w.abs(), _complex(2, 3, 7, 10), _complex(1)),
    "norm of all": (lambda x, w: torch.linalg.vector_norm(x) * w.abs(), _complex(2, 3, 7, 10), _complex(1)),
    "largest": (lambda x, w: torch.linalg.vector_norm(x, torch.inf, 2) * w.abs(), _complex(2, 3, 7, 10), _complex(1)),
    "largest, wider": (
        lambda x, w: torch.linalg.vector_norm(x.float(), torch.inf, 3, dtype=torch.float64) * w,
        _real(2, 3, 7, 10),
        _real(1),
    ),
    "normalize": (lambda x, w: F.normalize(x) * w, _complex(2, 3, 7, 10), _complex(1)),
    "dot of its conjugate": (lambda x, w: torch.vdot(w, x[0, 1, 2, :4]), _complex(2, 3, 7, 10), _complex(4)),
    "pseudo-inverse": (lambda x, w: torch.linalg.pinv(x) * w, _complex(2, 3, 7, 10), _complex(1)),
    "least squares": (lambda x, w: torch.linalg.lstsq(x, w.expand(2, 3, 7, 2)).solution, _complex(2, 3, 7, 6), _complex(1)),
    "Kronecker": (lambda x, w: torch.kron(x[0, 0], x[0, 1, :2].conj()) * w, _complex(1, 2, 7, 10), _complex(1)),
    "from frequencies": (lambda x, w: torch.istft(x[0], 6, 1) * w, _complex(1, 1, 4, 3), _complex(1)),
    "product of whole numbers": (
        lambda x, w: torch.addmm(_whole(x), _whole(x), torch.arange(100).view(10, 10), beta=1.0, alpha=3.0),
        _real(1, 1, 7, 10),
        _real(1),
    ),
    "bytes, nearest": (lambda x, w: F.interpolate(x, scale_factor=2), _bytes(2, 3, 7, 10), _real(1)),
    "bytes, nearest exact": (lambda x, w: F.interpolate(x, (5, 13), mode="nearest-exact"), _bytes(2, 3, 7, 10), _real(1)),
    "bytes, bilinear": (lambda x, w: F.interpolate(x, (5, 13), mode="bilinear"), _bytes(2, 3, 7, 10), _real(1)),
    "bytes, antialiased": (
        lambda x, w: F.interpolate(x, (5, 13), mode="bicubic", antialias=True),
        _bytes(2, 3, 7, 10),
        _real(1),
    ),
    "any byte": (lambda x, w: x.any(3), _bytes(2, 3, 7, 10) // 250 * 7, _real(1)),
    "all bytes": (lambda x, w: x.all(), _bytes(2, 3, 7, 10), _real(1)),
    "any over no dim": (lambda x, w: x.any(dim=()), _bytes(2, 3, 7, 10), _real(1)),
    "all of numbers": (lambda x, w: x.detach().all(2), _real(2, 3, 7, 10), _real(1)),
    "dot of bytes": (lambda x, w: x.flatten().dot(x.flatten()), _bytes(2, 3, 7, 10), _real(1)),
    "padded by a complex": (lambda x, w: torch.constant_pad_nd(x, (1, 2, 1, 0), 1 + 2j) * w, _complex(2, 3, 7, 10), _complex(1)),
    "not a number": (lambda x, w: F.adaptive_avg_pool2d(x, (3, 4)) * w, _with_infinity(torch.nan), _real(1)),
    "infinity": (lambda x, w: F.adaptive_avg_pool2d(x, (3, 4)) * w, _with_infinity(torch.inf), _real(1)),
    "joined with nothing": (lambda x, w: torch.cat([torch.empty(0, dtype=x.dtype), x.float()]) * w, _real(2, 3, 7, 10), _real(1)),
    "counts": (lambda x, w: _counts(x.detach().abs() * 9) * w, _real(1, 1, 1, 10), _real(1)),
}  # fmt: skip


def _step(case, image, weight, layout=None):
    image, weight = (t.detach().clone().requires_grad_(t.dtype != torch.uint8) for t in (image, weight))
    output = case(image, weight)
    if output.requires_grad:
        (output * output.conj().detach()).real.sum().backward()
    if weight.grad is not None and layout is not None:  # by the mean rule
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    of_images = [t if layout is None else layout.full(t) for t in (output.detach(), image.grad) if t is not None]
    return [*of_images, weight.grad] if weight.grad is not None else of_images


def _wrong(axes):
    layout = make_layout(axes)
    wrong = []
    for name, (case, image, weight) in CASES.items():
        expected = _step(case, image, weight)
        channels_last = name.startswith(("linear", "matmul"))
        cut = layout.shard(image.movedim(-1, 1) if channels_last else image)
        got = _step(case, cut.movedim(1, -1) if channels_last else cut, weight, layout)
        for mine, reference in zip(got, expected, strict=True):
            same = mine.dtype == reference.dtype and mine.shape == reference.shape
            if not same or not torch.allclose(mine, reference, equal_nan=True):
                wrong.append((name, str(mine.dtype), str(reference.dtype), (mine - reference).abs().max().item()))
    return wrong


def _conjugated(axes):
    layout = make_layout(axes)
    full = _complex(2, 3, 7, 10).conj()
    made = layout.shard(full), layout.from_tile(full[layout.tile(full.shape)], full.shape), layout.replicate(full)
    wrong = [i for i, tensor in enumerate(made) if not torch.allclose(layout.full(tensor * 2), full * 2)]
    negative = layout.from_tile(full.imag[layout.tile(full.shape)], full.shape)
    return wrong, torch.allclose(layout.full(negative * 2), full.imag * 2)


@pytest.mark.parametrize("axes", [{"w": 1}, {"w": 2}], ids=str)
def test_what_is_conjugated_or_negative_only_by_its_mark_becomes_so(axes):
    for found in run_ranks(_conjugated, axes["w"], axes):
        assert found == ([], True)


@pytest.mark.parametrize("axes", [{"w": 3}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.filterwarnings("ignore::torchtp.GatherWarning")
def test_rules_of_other_numbers(axes):
    num_ranks = 4 if len(axes) == 2 else next(iter(axes.values()))
    for wrong in run_ranks(_wrong, num_ranks, axes, timeout=120):
        assert wrong == []
