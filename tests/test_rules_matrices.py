"""Matrices in the last dims of cut DTensors, one at each place or cut themselves, equal the single device without a gather."""

from __future__ import annotations

import pytest
import torch
from rules import HW, W3, check, device_mesh_of, num_ranks

import torchtp
from torchtp.testing import RanksFailed, run_ranks

IMAGE = (2, 9, 5, 7)


def at_each_place(x):
    """[N, H, W, 3, 3]"""
    return x.unflatten(1, (3, 3)).permute(0, 3, 4, 1, 2)


def pixels(x):
    """[N, H * W, 9]"""
    return x.flatten(2).transpose(1, 2)


def regular(x):
    return at_each_place(x).sin() + 4 * torch.eye(3, dtype=x.dtype)


def symmetric(x):
    return at_each_place(x) + at_each_place(x).mT


def scaled_diagonal(x):
    matrices = at_each_place(x) * 1
    matrices.diagonal(dim1=-2, dim2=-1).mul_(2)
    matrices.diagonal(1, -2, -1).add_(x[:, :2].permute(0, 2, 3, 1))
    return matrices.sin()


def similar(x):
    rows = x.flatten(2).transpose(1, 2)
    return rows @ rows.mT


def own_similarity_written(x):
    similarities = similar(x) * 1
    similarities.diagonal(dim1=1, dim2=2).fill_(-1.0)
    similarities[0].diagonal().mul_(3.0)
    similarities.mT.diagonal(dim1=-1, dim2=-2).add_(1.0)
    return similarities.sin()


CASES = {
    "inverse": lambda x: torch.linalg.inv(regular(x)),
    "solve": lambda x: torch.linalg.solve(regular(x), at_each_place(x)[..., :1]),
    "determinant": lambda x: torch.linalg.det(regular(x)),
    "log_determinant": lambda x: torch.linalg.slogdet(regular(x))[1],
    "determinant_of_a_slice": lambda x: torch.linalg.det(x[:, :, :4, :4]) + torch.linalg.slogdet(x[:, :, :4, :4])[1],
    "determinant_of_a_transpose": lambda x: torch.linalg.det(x[..., :5].mT) * torch.linalg.det(x[..., :5].contiguous()),
    "determinant_of_rows": lambda x: torch.linalg.det(x.permute(0, 2, 3, 1)[:, :, :3, :3]),
    "determinant_of_transposes": lambda x: torch.linalg.det(regular(x).mT).sin(),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(symmetric(x)),
    "singular_values": lambda x: torch.linalg.svdvals(regular(x)),
    "triangular": lambda x: torch.linalg.solve_triangular(regular(x).tril(), at_each_place(x), upper=False),
    "exponential": lambda x: torch.linalg.matrix_exp((regular(x) * 0.3).contiguous()),
    "diagonal_written": scaled_diagonal,
    "trace": lambda x: torch.einsum("bhwii->bhw", at_each_place(x)).sin(),
    "diagonal_of_channels": lambda x: torch.diagonal(x, 1, 0, 1).sin(),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(at_each_place(x), x[:, :3].permute(0, 2, 3, 1), 0, -2, -1).sin(),
    "own_similarity": lambda x: torch.diagonal(similar(x), 0, 1, 2).sin() * similar(x).log_softmax(2).diagonal(0, 2, 1),
    "own_similarity_to_some": lambda x: torch.diagonal(x[..., :3].mT, 0, 2, 3).sin() * x[..., :3].diagonal(0, 3, 2).cos(),
    "beside_the_diagonal": lambda x: torch.diagonal(x, 1, 2, 3).sin() + torch.diagonal(x[..., 1:], -1, 2, 3)[..., :1],
    "own_similarity_written": own_similarity_written,
    "diag_embed": lambda x: torch.diag_embed(x.permute(0, 2, 3, 1), -1).sin(),
    "triangles_of_the_image": lambda x: x.tril(1).sin() + x.triu(-2) * x.transpose(2, 3).tril().transpose(2, 3),
    "triangles_in_place": lambda x: (x * 1).tril_(1).sin() + (x * 1).triu_(-2),
    "distances_to_codes": lambda x: torch.cdist(pixels(x), pixels(x)[:, :5].detach() + 1).sin(),
    "distances_to_many_codes": lambda x: torch.cdist(pixels(x)[0], torch.linspace(-1, 1, 270).double().view(30, 9)).sin(),
    "distances_from_codes": lambda x: torch.cdist(torch.linspace(-1, 1, 540).double().view(2, 30, 9), pixels(x)).sin(),
    "distances_of_pixels": lambda x: torch.cdist(pixels(x), pixels(x).cos(), p=1.0),
    "distances_at_each_place": lambda x: torch.cdist(regular(x), regular(x).cos() + 1).sin(),
}  # fmt: skip
# Upstream of them a product of matrices, whose batch is folded into one dim: on two axes it is gathered.
ON_TWO_AXES = {
    "own_similarity",
    "exponential",
    "diagonal_of_channels",
    "diag_embed",
    "triangles_of_the_image",
    "triangles_in_place",
}


# PyTorch has no second derivatives of distances between few rows, or of other norms.
ONCE = {"distances_of_pixels", "distances_to_codes", "distances_at_each_place"}


def compare(name, mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), range(len(mesh[0])))
    torch.manual_seed(0)
    gathers = len(mesh[0]) > 1 and name not in ON_TWO_AXES
    gathers = (gathers and not name.startswith("distances")) or name.startswith(("determinant_of", "beside"))
    check(CASES[name], mesh, [torch.randn(IMAGE).double()], gathers=gathers, double=name not in ONCE)


@pytest.mark.parametrize("mesh", [W3, HW], ids=["w3", "hw"])
@pytest.mark.parametrize("name", CASES)
def test_matrices(name, mesh):
    run_ranks(compare, num_ranks(mesh), name, mesh, backend="gloo")


def singular_somewhere():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("w",))
    torchtp.Layout(mesh, spatial={"w": -1})
    image = torch.eye(3).flatten().view(1, 9, 1, 1).repeat(1, 1, 2, 7)
    image[0, :, 1, 6] = 0
    torch.linalg.inv(at_each_place(distribute_tensor(image, mesh, [Shard(3)], src_data_rank=None)))


def test_a_singular_matrix_is_named_by_all_ranks():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(singular_somewhere, 3)
    assert len(failed.value.failures) == 3
    assert all("Batch element 13" in text for text in failed.value.failures.values())


class Inverse(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.inv(regular(x))


def test_matrices_are_explained_without_data():
    assert not torchtp.explain(Inverse(), (1, 9, 4, 6), {"w": 2}).gathers
