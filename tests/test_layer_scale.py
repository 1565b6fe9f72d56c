"""layer_scale (layer scale, DropPath and residual in one pass) against the three ops it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchtp  # noqa: F401


def reference(residual: Tensor, branch: Tensor, gamma: Tensor | None, keep: Tensor | None) -> Tensor:
    def along(numbers: Tensor, dim: int) -> Tensor:
        return numbers.view([-1 if i == dim else 1 for i in range(branch.dim())])

    if gamma is not None:
        branch = branch * along(gamma, 1)
    if keep is not None:
        branch = branch * along(keep, 0)
    return residual + branch


def inputs(shape, dtype=torch.float64, layout=torch.contiguous_format, gamma=True, keep=True):
    torch.manual_seed(0)
    residual, branch = (torch.randn(shape, dtype=dtype).contiguous(memory_format=layout) for _ in range(2))
    scale = torch.randn(shape[1], dtype=dtype).requires_grad_() if gamma else None
    mask = torch.tensor([0.0, 1.25, 1.25])[torch.arange(shape[0]) % 3].to(dtype) if keep else None
    return [residual.requires_grad_(), branch.requires_grad_(), scale, mask]


SHAPES = [(3, 5), (3, 5, 7), (3, 8, 4, 6), (2, 3, 1, 5), (1, 16, 2, 3, 4), (0, 4, 3, 3), (2, 4, 0, 3), (3, 32, 40, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gamma", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_equals_the_ops_it_stands_for(shape, gamma, keep):
    layouts = [torch.contiguous_format]
    layouts += [torch.channels_last] * (len(shape) == 4) + [torch.channels_last_3d] * (len(shape) == 5)
    for layout in layouts:
        args = inputs(shape, layout=layout, gamma=gamma, keep=keep)
        wanted = [x for x in args[:3] if x is not None]
        out, expected = torch.ops.torchtp.layer_scale(*args), reference(*args)
        dy = torch.randn_like(expected)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        for found, grad in zip(
            torch.autograd.grad(out, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True
        ):
            torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_taken_in_fp32(dtype):
    args = inputs((3, 8, 30, 40), dtype=dtype)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in args]
    out, expected = torch.ops.torchtp.layer_scale(*args), reference(*wide)
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=rounding)
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, args[:3], dy)
    theirs = torch.autograd.grad(expected, wide[:3], dy.double())
    for a, b in zip(found, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rounding, atol=rounding * b.abs().mean().item())


def test_gradients_of_gradients_are_exact():
    args = inputs((2, 3, 3, 4))
    assert torch.autograd.gradcheck(torch.ops.torchtp.layer_scale, args)
    assert torch.autograd.gradgradcheck(torch.ops.torchtp.layer_scale, args)


def test_a_strided_gradient_and_a_branch_of_another_layout():
    args = inputs((2, 4, 5, 6))
    args[0] = args[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = torch.autograd.grad(reference(*args).sum(), args[:3])
    for a, b in zip(torch.autograd.grad(torch.ops.torchtp.layer_scale(*args).sum(), args[:3]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_schema_fake_and_autograd():
    args = inputs((2, 4, 5, 6), layout=torch.channels_last)
    torch.library.opcheck(torch.ops.torchtp.layer_scale.default, args)
    branch, gamma, keep = (x.detach() for x in args[1:])
    backward = torch.ops.torchtp.layer_scale_backward.default
    torch.library.opcheck(backward, (torch.randn(2, 4, 5, 6, dtype=torch.float64), branch, gamma, keep, [True, True]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.randn(2, 4, 5, 5)}, r"sizes of residual are \[2, 4, 5, 6\] here, got \[2, 4, 5, 5\]"),
        ({0: torch.randn(2, 4, 5, 6).double()}, "residual and branch are alike in dtype"),
        ({0: torch.randn(2, 4, 5, 6, device="meta")}, "device of residual is meta, that of the input cpu"),
        ({2: torch.randn(3)}, "each of 4 channels"),
        ({3: torch.randn(4)}, "each of 2 samples"),
        ({3: torch.ones(2, requires_grad=True)}, "keep is a mask"),
    ],
)
def test_refusals(change, message):
    args = [torch.randn(2, 4, 5, 6), torch.randn(2, 4, 5, 6), torch.randn(4), torch.ones(2)]
    for place, value in change.items():
        args[place] = value
    with pytest.raises(ValueError, match=message):
        torch.ops.torchtp.layer_scale(*args)


@pytest.mark.parametrize("wants_graph", [False, True])
def test_a_gradient_of_other_sizes_is_refused(wants_graph):
    branch, gamma = torch.randn(2, 4, 5, 6), torch.randn(4)
    for device in ("cpu", "meta"):
        grad = torch.randn(2, 4, 5, 1, device=device, requires_grad=wants_graph)
        with pytest.raises(ValueError, match="sizes of grad_output are"):
            torch.ops.torchtp.layer_scale_backward(grad, branch.to(device), gamma.to(device), None, [True, True])
