"""Matrix products and attention of cut DTensors equal the single device, without a gather."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H4, HW, W3, check, device_mesh_of, num_ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 4, 5, 7)
HEADS = (2, 2, 35, 3)


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def heads(x):
    """[N, 2, L, C / 2]"""
    return tokens(x).unflatten(-1, (2, -1)).transpose(1, 2)


def attend(q, k, v, **options):
    with sdpa_kernel(SDPBackend.MATH):  # which can be derived twice
        return F.scaled_dot_product_attention(q, k, v, **options)


def alternating(rows, columns):
    return torch.arange(rows * columns).view(rows, columns) % 3 != 1


def attended_by_few(x, queries):
    """Keys and values are cut, a few learned queries are not."""
    of_x = tokens(x)
    scores = torch.matmul(queries.expand(2, -1, -1), of_x.transpose(1, 2)).softmax(-1)
    return torch.matmul(scores, of_x).square()


CASES = {  # of an image, with the shapes of parameters
    "rows_by_whole": (lambda x, w: torch.matmul(tokens(x), w).sin(), [(4, 3)]),
    "whole_by_columns": (lambda x, w: torch.matmul(w, x.flatten(2)).sin(), [(3, 4)]),
    "rows_by_vector": (lambda x, w: torch.matmul(tokens(x), w).sin(), [(4,)]),
    "batch_of_weights": (lambda x, w: torch.bmm(x.flatten(2).sin(), w), [(2, 35, 3)]),
    "rows_by_columns": (lambda x: torch.bmm(tokens(x), x.flatten(2)).sin(), []),
    "over_the_cut_dim": (lambda x: torch.bmm(x.flatten(2), tokens(x)).sin(), []),
    "over_and_columns": (lambda x: torch.bmm(x.flatten(2), torch.bmm(tokens(x), x.flatten(2)).sin()), []),
    "columns_and_over": (lambda x: torch.bmm(torch.bmm(tokens(x), x.flatten(2)).sin(), tokens(x)), []),
    "sum_and_product": (lambda x, w: torch.baddbmm(w, x.flatten(2), tokens(x), beta=0.5, alpha=2).sin(), [(2, 4, 4)]),
    "without_sum": (lambda x, w: torch.baddbmm((-w.square()).log(), x.flatten(2), tokens(x), beta=0).sin(), [(4,)]),
    "matrices": (lambda x, w: torch.addmm(w[0], tokens(x).flatten(0, 1), w.t()).sin() @ w, [(4, 4)]),
    "over_all_places": (lambda x: (tokens(x).flatten(0, 1).t() @ tokens(x).flatten(0, 1)).sin(), []),
    "along_places": (lambda x, w, b: F.linear(x.flatten(2).sin(), w, b).sin(), [(6, 35), (6,)]),
    "along_columns": (lambda x, w: F.linear(x.sin(), w).sin(), [(9, 7)]),
    "einsum": (lambda x, w: torch.einsum("nchw,ndhw,cd->ncd", x, x.sin(), w), [(4, 4)]),
    "transform_of_rows": (lambda x, w: torch.einsum("kh,nchw->nckw", w, x.sin()).square(), [(5, 5)]),
    "transform_of_columns": (lambda x, w: torch.einsum("kw,nchw->nchk", w, x.sin()).square(), [(9, 7)]),
    "few_queries": (attended_by_few, [(1, 3, 4)]),
    "attention": (lambda x: attend(heads(x), heads(x * 0.5), heads(x).sin()).square(), []),
    "attention_causal": (lambda x: attend(heads(x), heads(x * 0.5), heads(x).sin(), is_causal=True, scale=0.4), []),
    "attention_mask": (lambda x: attend(heads(x), heads(x), heads(x), attn_mask=alternating(35, 35)).sin(), []),
    "attention_bias": (lambda x, b: attend(heads(x), heads(x), heads(x), attn_mask=b).sin(), [(2, 35, 35)]),
    "attention_of_windows": (
        lambda x: attend(*[tokens(x.unfold(3, 3, 2).movedim(3, 1).flatten(0, 1).flatten(3))[:, None]] * 3).square(),
        [],
    ),
    "attention_of_many_images": (lambda x: attend(heads(x[:1]), heads(x), heads(x).sin()).square(), []),
    "attention_without_heads": (lambda x: attend(tokens(x)[0], heads(x.repeat(1, 2, 1, 1)), heads(x)).square(), []),
    "attention_of_one_value": (
        lambda x: attend(*[t.permute(0, 3, 2, 1) for t in (x, x.sin(), x.mean(3, keepdim=True))]).square(),
        [],
    ),
    "linear_of_nothing": (lambda x, w: torch.matmul(tokens(x)[..., :0], w[:0]).sin(), [(4, 3)]),
    "masked_out": (lambda x: attend(*[heads(x)] * 3, attn_mask=torch.arange(35)[:, None] > 3).nan_to_num().sin(), []),
    "softmax_of_nothing": (
        lambda x: torch.ops.aten._safe_softmax(
            tokens(x).sin().masked_fill((torch.arange(4) == 1) & (torch.arange(35)[:, None] >= 0), -torch.inf), 1
        ),
        [],
    ),
}  # fmt: skip


def run_case(name, mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    torch.manual_seed(0)
    fn, shapes = CASES[name]
    gathers = name in OF_IMAGES_AND_PLACES and len(mesh[0]) > 1
    parameters = [torch.randn(shape).double() for shape in shapes]
    check(fn, mesh, [torch.randn(IMAGE).double()], parameters, gathers=gathers)


OF_IMAGES_AND_PLACES = (
    "matrices",
    "over_all_places",
    "attention_of_windows",
    "attention_of_many_images",
    "attention_without_heads",
)  # merged: two cuts do not fit into one dim


@pytest.mark.parametrize("mesh", [W3, H4, HW, DATA_W], ids=["w3", "h4", "hw", "data_w"])
@pytest.mark.parametrize("name", CASES)
def test_products_match_the_whole(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh, backend="gloo")


def in_inference_mode(dtype):
    torchtp.dtensor.mark(device_mesh_of(W3[0]), [0])
    torch.manual_seed(1)
    x = torch.randn(IMAGE)
    layout = torchtp.Layout(
        torch.distributed.device_mesh.init_device_mesh("cpu", (3,), mesh_dim_names=("w",)), {"w": -1}
    )
    with torch.inference_mode(), torchtp.strict():
        cut = layout.shard(x.to(dtype))
        got = F.scaled_dot_product_attention(heads(cut), heads(cut), heads(cut)).full_tensor()
        expected = F.scaled_dot_product_attention(heads(x), heads(x), heads(x))
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_inference_mode(dtype):
    run_ranks(in_inference_mode, 3, dtype, backend="gloo")


def transforms(mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    placements = [Shard(dim) if dim else Replicate() for dim in mesh[1]]
    x = distribute_tensor(torch.randn(1, 8, 12, 16), device_mesh_of(mesh[0]), placements)
    with torchtp.strict():
        rows = torch.einsum("kh,nchw->nckw", torch.randn(12, 12), x)
        columns = torch.einsum("kw,nchw->nchk", torch.randn(16, 16), x)
    return [max(y.to_local().numel() * y.device_mesh.size() / y.numel() for y in (rows, columns))]


@pytest.mark.parametrize("mesh", [W3, H4, HW], ids=["w3", "h4", "hw"])
def test_transforms_of_a_cut_dim_are_cut(mesh):
    for (share,) in run_ranks(transforms, num_ranks(mesh), mesh, backend="gloo"):
        assert share <= 1.2, share


def kept():
    """Bytes that autograd keeps between forward and backward: of the gathered keys and values nothing."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (3,), mesh_dim_names=("h",))
    layout = torchtp.Layout(mesh, {"h": -2})
    x = layout.shard(torch.randn(1, 8, 30, 40)).requires_grad_()
    q = heads(x)
    storages = {}

    def note(tensor):
        local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.scaled_dot_product_attention(q, q, q)
    return sum(storages.values())


def test_attention_keeps_no_whole_keys():
    assert max(run_ranks(kept, 3, backend="gloo")) <= 8 * 10 * 40 * 4  # queries, keys and values are one tensor here


def run_in_one_order():
    """The last of three ranks has nothing or one row; strides are the same everywhere, and derivatives go by them."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (3,), mesh_dim_names=("w",))
    layout = torchtp.Layout(mesh, {"w": -1})
    torch.manual_seed(0)
    strides = []
    for width in (4, 7):
        image, other = torch.randn(2, 4, 3, width).double(), torch.randn(width, 5).double()
        for full in (image, image.contiguous(memory_format=torch.channels_last)):
            x = layout.shard(full)
            transposed = [x.transpose(1, 2), x.transpose(2, 3).contiguous(), F.pad(x, (1, 1)), x[:, :2] @ other, x + 1]
            strides += [each.stride() for each in (x, *transposed)]
    return strides


def test_strides_are_the_same_on_all_ranks():
    first, *others = run_ranks(run_in_one_order, 3)
    assert all(strides == first for strides in others)


def products_of_transposed(a, m):
    """Which factor is transposed in the derivative of a product goes by strides."""
    parts = a @ a[:, :2].transpose(-2, -1) @ a[:, 1:]
    return torch.linalg.qr((parts.transpose(-2, -1) - m.mH)[0]).Q.mH @ m


def run_transposed():
    torchtp.dtensor.mark(device_mesh_of((2,)), [0])
    torch.manual_seed(0)
    inputs = [torch.randn(3, 3, 3).double()], [torch.randn(3, 3).double()]
    check(products_of_transposed, ((2,), (2,)), *inputs, double=False, gathers=True)


def test_derivatives_of_transposed_products_take_one_way():
    run_ranks(run_transposed, 2)
