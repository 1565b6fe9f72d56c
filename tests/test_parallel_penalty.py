"""Gradient penalties of parallelized networks equal one process, also where autograd makes zeros of its own; writes into views of sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchtp
from torchtp.testing import run_ranks


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, fn, *modules):
        super().__init__()
        self.fn, self.parts = fn, nn.ModuleList(modules)

    def forward(self, x):
        return self.fn(x, *self.parts)


def losses(x):
    return F.smooth_l1_loss(x, x.detach() / 2 + 0.3) + F.huber_loss(x, x.detach() / 2) + F.l1_loss(x, x.detach() / 2)


FIRST = {
    "convolution": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "linear": lambda: Of(lambda x, f: f(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.Linear(3, 4)),
    "attention": lambda: Of(
        lambda x, f: (
            F.scaled_dot_product_attention(*[f(x).flatten(2).transpose(1, 2)[:, None]] * 3)[:, 0]
            .transpose(1, 2)
            .unflatten(2, x.shape[2:])
        ),
        nn.Conv2d(3, 4, 1),
    ),
    "turned": lambda: Of(lambda x, f: f(x).cumsum(3), nn.Conv2d(3, 4, 1)),
}
LAST = {
    "abs": lambda: Of(torch.abs),
    "norms": lambda: Of(lambda x: x.norm(p=1, dim=1) + x.norm(dim=1) + F.normalize(x, p=1, dim=1).sum(1)),
    "losses": lambda: Of(losses),
    "whole_rows": lambda: Of(lambda x: x.mean(3)),
    "pool_of_whole_rows": lambda: Of(lambda x: F.avg_pool1d(x.mean(3), 3) + F.max_pool1d(x.mean(3), 3)),
    "pools_of_both": lambda: Of(
        lambda x: torch.cat([F.avg_pool1d(x.mean(2), 4, 3), F.adaptive_max_pool1d(x.mean(3), 5)], 2)
    ),
    "abs_of_whole_rows": lambda: Of(lambda x: x.mean(3).abs()),
    "sorted": lambda: Of(lambda x: x.sort(3).values + x.median(3, keepdim=True).values),
    "resampled": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "pools": lambda: Of(lambda x: F.avg_pool2d(x, 2) + F.max_pool2d(x, 2)),
    "clamped": lambda: Of(lambda x: x.clamp(-0.3, 0.4) + torch.maximum(x, -x)),
}


def penalties(shape, cut, first):
    """For each last layer what differs: of a penalty alone, and beside the loss; where it weighs outputs alike or not."""
    layout = torchtp.Layout(init_device_mesh("cpu", shape, mesh_dim_names=tuple(cut)), spatial=cut)
    wrong = []
    for last, make in LAST.items():
        for linear, alone in ((True, True), (True, False), (False, False)):
            results = []
            for parallel in (False, True):
                torch.manual_seed(0)
                network = nn.Sequential(FIRST[first](), make()).double()
                parameters = list(network.parameters())
                if parallel:
                    network = torchtp.parallelize(network, layout, output="full")
                image = torch.randn(2, 3, 12, 14).double().requires_grad_()
                output = network(image)
                loss = output.sum() if linear else output.square().sum()
                (gradient,) = torch.autograd.grad(loss, image, create_graph=True)
                if not gradient.requires_grad:
                    continue
                (gradient.square().sum() + (0 if alone else loss)).backward()
                results.append([image.grad, *(parameter.grad for parameter in parameters)])
            for number, (mine, reference) in enumerate(zip(*results[::-1], strict=True) if results else ()):
                mine, reference = (torch.zeros(()) if t is None else t for t in (mine, reference))
                error = (mine - reference).abs().max() / max(1.0, reference.abs().max())
                if not error < 1e-10:
                    wrong.append((last, linear, alone, number, float(error)))
    return wrong


@pytest.mark.parametrize(("shape", "cut"), [((3,), {"w": -1}), ((2, 2), {"h": -2, "w": -1})], ids=["w3", "hw"])
@pytest.mark.parametrize("first", FIRST)
def test_penalties(first, shape, cut):
    assert run_ranks(penalties, torch.Size(shape).numel(), shape, cut, first) == [[]] * torch.Size(shape).numel()


def affinity(x):
    """[N, C, C], a sum over all places: every rank holds it, the gradient that comes back is in summands."""
    features = x.flatten(2)
    return features @ features.transpose(1, 2) / features.shape[2]


def written(change):
    def forward(x):
        matrix = affinity(x)
        change(matrix)
        return matrix @ x.flatten(2)

    return forward


def complex_part(x):
    both = torch.complex(affinity(x), affinity(x) * 2)
    both.real.mul_(3)
    return (both * both).real @ x.flatten(2)


WRITES = {
    "diagonal": written(lambda a: a.diagonal(dim1=1, dim2=2).zero_()),
    "diagonal_scaled": written(lambda a: a.diagonal(dim1=1, dim2=2).mul_(2)),
    "unfold": written(lambda a: a.unfold(2, 2, 2).mul_(2)),
    "as_strided": written(lambda a: a.as_strided((2, 2), (9, 4), 1).mul_(3)),
    "of_a_part": written(lambda a: a[1].fill_diagonal_(0)),
    "fill_diagonal": lambda x: (lambda a: a.fill_diagonal_(0) @ x[0].flatten(1))(affinity(x)[1] * 1),
    "strided_view_of_a_part": written(lambda a: a[1].as_strided((3,), (4,), 9).mul_(3)),
    "copy_of_a_diagonal": written(lambda a: a.diagonal(dim1=1, dim2=2).contiguous().mul_(2)),
    "copy_of_windows": written(lambda a: a.unfold(2, 2, 2).reshape(-1).mul_(2)),
    "transposed": written(lambda a: a.mT[:, 1].mul_(2)),
    "real": complex_part,
}


def compare_writes():
    layout = torchtp.Layout(init_device_mesh("cpu", (3,), mesh_dim_names=("w",)), spatial={"w": -1})
    wrong = []
    for name, fn in WRITES.items():
        results = []
        for parallel in (False, True):
            network = torchtp.parallelize(Of(fn), layout, output="full") if parallel else Of(fn)
            image = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
            output = network(image)
            (gradient,) = torch.autograd.grad(output.square().sum(), image, create_graph=True)
            gradient.square().sum().backward()
            results.append([output, gradient, image.grad])
        for what, mine, reference in zip(("output", "gradient", "second"), *results[::-1], strict=True):
            error = (mine - reference).abs().max() / reference.abs().max()
            if not error < 1e-10:
                wrong.append((name, what, float(error)))
    return wrong


def test_writes_into_views_of_sums_reach_their_gradients():
    assert run_ranks(compare_writes, 3) == [[]] * 3


def of_sparse(x):
    places = x.flatten(2)[0].t()
    number = len(places)
    index = torch.stack([torch.arange(number), torch.arange(number).flip(0)])
    graph = torch.sparse_coo_tensor(index, torch.linspace(0, 1, number, dtype=x.dtype), (number, number))
    return torch.sparse.mm(graph, places)


def compare_sparse():
    layout = torchtp.Layout(init_device_mesh("cpu", (2,), mesh_dim_names=("w",)), spatial={"w": -1})
    gradients = []
    for parallel in (False, True):
        network = torchtp.parallelize(Of(of_sparse), layout, output="full") if parallel else Of(of_sparse)
        image = torch.randn(1, 3, 4, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
        network(image).square().sum().backward()
        gradients.append(image.grad)
    return torch.allclose(*gradients)


@pytest.mark.filterwarnings("ignore::torchtp.GatherWarning")
def test_a_sparse_matrix_of_places():
    assert all(run_ranks(compare_sparse, 2))
