"""Runs a function on cut DTensors and on whole tensors and compares all that autograd gives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from ranks_device import make_mesh, moved
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtp

# mesh shape and the tensor dim each axis cuts (None: replicated)
W2 = ((2,), (3,))
W3 = ((3,), (3,))
W4 = ((4,), (3,))
H2 = ((2,), (2,))
H4 = ((4,), (2,))
HW = ((2, 2), (2, 3))
DATA_W = ((2, 2), (0, 3))
REPLICA_H = ((2, 2), (None, 2))

Mesh = tuple[tuple[int, ...], tuple[int | None, ...]]


@functools.cache
def device_mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """One mesh of a shape for all cases of a worker: every new one brings groups with threads of their own."""
    return make_mesh(shape)


def num_ranks(mesh: Mesh) -> int:
    number = 1
    for size in mesh[0]:
        number *= size
    return number


def placements_of(mesh: Mesh) -> list:
    return [Replicate() if dim is None else Shard(dim) for dim in mesh[1]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def assert_same(name: str, mine: torch.Tensor | None, reference: torch.Tensor | None, tolerance: float = 1e-10) -> None:
    if reference is None or mine is None:
        assert reference is None and (mine is None or not mine.any()), f"{name}: {mine} against {reference}"
        return
    assert mine.shape == reference.shape, f"{name}: shape {tuple(mine.shape)}, not {tuple(reference.shape)}"
    assert mine.dtype == reference.dtype, f"{name}: dtype {mine.dtype}, not {reference.dtype}"
    if not reference.is_floating_point():
        assert torch.equal(mine, reference), f"{name} differs"
        return
    error = (mine - reference).abs().max().item() if mine.numel() else 0.0
    scale = max(1.0, reference.abs().max().item()) if mine.numel() else 1.0
    assert error <= tolerance * scale, f"{name}: off by {error:.3e} (of {scale:.3e})"


def check(
    fn: Callable[..., torch.Tensor],
    mesh: Mesh,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor] = (),
    plain: bool = True,
    double: bool = True,
    cut_output: bool | None = None,
    gathers: bool = False,
) -> None:
    """Compare fn(*inputs, *parameters): output, gradients, and the gradients of a function of the gradients.

    `plain`: parameters are plain tensors and obey the mean rule; else they are replicated DTensors. Nothing may be
    gathered unless `gathers`.
    """
    with contextlib.nullcontext() if gathers else torchtp.strict():
        _check(fn, mesh, inputs, parameters, plain, double, cut_output)


def _check(
    fn: Callable[..., torch.Tensor],
    mesh: Mesh,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    plain: bool,
    double: bool,
    cut_output: bool | None,
) -> None:
    device_mesh = device_mesh_of(mesh[0])
    inputs, parameters = [moved(t) for t in inputs], [moved(t) for t in parameters]
    placements = placements_of(mesh)
    references = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (*inputs, *parameters)]
    mine = [
        distribute_tensor(
            t.detach().clone(), device_mesh, [p if p.is_replicate() or (p.dim < t.dim() and t.size(p.dim) > 1) else Replicate() for p in placements],
            src_data_rank=None,
        ).requires_grad_(t.is_floating_point())
        for t in inputs
    ]  # fmt: skip
    for t in parameters:
        t = t.detach().clone()
        if not plain:
            t = distribute_tensor(t, device_mesh, [Replicate()] * len(placements), src_data_rank=None)
        mine.append(t.requires_grad_(t.is_floating_point()))
    expected, got = fn(*references), fn(*mine)
    assert isinstance(got, DTensor), f"the output is a {type(got)}"
    if cut_output is not None:
        assert any(p.is_shard() for p in got.placements) == cut_output, f"the output is {got.placements}"
    assert_same("output", whole(got), expected)
    if not expected.requires_grad:
        return
    torch.manual_seed(7)
    cotangent = torch.randn_like(expected)
    wanted = [i for i, t in enumerate(references) if t.requires_grad]
    grads = torch.autograd.grad(
        expected, [references[i] for i in wanted], cotangent, create_graph=double, allow_unused=True
    )
    my_cotangent = distribute_tensor(
        cotangent, got.device_mesh, [Replicate()] * got.device_mesh.ndim, src_data_rank=None
    )
    my_grads = torch.autograd.grad(got, [mine[i] for i in wanted], my_cotangent, create_graph=double, allow_unused=True)
    for i, grad, my_grad in zip(wanted, grads, my_grads, strict=True):
        _compare_gradient(f"gradient {i}", my_grad, grad, i >= len(inputs) and plain)
    if not double:
        return
    # through the input gradients always; through parameter gradients where these are whole on every rank
    through = [k for k, i in enumerate(wanted) if grads[k] is not None and grads[k].requires_grad]
    through = [k for k in through if not plain or wanted[k] < len(inputs)]
    if not through:
        return
    vectors = [torch.randn_like(grads[k]) for k in through]
    second = torch.autograd.grad(
        [grads[k] for k in through], [references[i] for i in wanted], vectors, allow_unused=True
    )
    my_vectors = [
        distribute_tensor(v, device_mesh, [Replicate()] * device_mesh.ndim, src_data_rank=None) for v in vectors
    ]
    my_second = torch.autograd.grad(
        [my_grads[k] for k in through], [mine[i] for i in wanted], my_vectors, allow_unused=True
    )
    for i, grad, my_grad in zip(wanted, second, my_second, strict=True):
        _compare_gradient(f"second gradient {i}", my_grad, grad, i >= len(inputs) and plain)


def _compare_gradient(name: str, mine: torch.Tensor | None, reference: torch.Tensor | None, averaged: bool) -> None:
    if mine is not None and averaged:
        assert not isinstance(mine, DTensor), f"{name} of a plain parameter is a DTensor"
        mine = mean_over_ranks(mine)
    assert_same(name, None if mine is None else whole(mine), reference)
