"""Reductions, losses and pointwise ops of unevenly cut DTensors equal the single device, without a gather."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H2, HW, W2, W3, check, num_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)
H3 = ((3,), (2,))


def labels(seed=3, classes=4):
    return torch.randint(0, classes, (2, 9, 11), generator=torch.Generator().manual_seed(seed))


def labels_of(x):
    return x.detach().argmax(1)


def weights():
    return torch.linspace(0.5, 2.0, 4).double()


def volume(x):
    return torch.stack([x, x.sin()], 2)


def voxels():
    return torch.stack([labels(), labels(5)], 1)


REDUCTIONS = {
    "sum": (lambda x: x.sum() * 2, [IMAGE]),
    "sum_hw": (lambda x: x.sum((2, 3)), [IMAGE]),
    "mean": (lambda x: x.mean(), [IMAGE]),
    "mean_hw": (lambda x: x.mean((2, 3), keepdim=True) * x, [IMAGE]),
    "dot": (lambda x: x.flatten().dot(x.flatten().sin()), [IMAGE]),
    "mean_c": (lambda x: x.mean(1, keepdim=True) * x, [IMAGE]),
    "mean_w": (lambda x: x.mean(3), [IMAGE]),
    "var": (lambda x: x.var((2, 3)), [IMAGE]),
    "std_all": (lambda x: x.std(), [IMAGE]),
    "var_c": (lambda x: x.var(1, unbiased=False), [IMAGE]),
    "var_mean": (lambda x: torch.var_mean(x, (2, 3), correction=0)[0] + torch.var_mean(x, (2, 3))[1], [IMAGE]),
    "amax": (lambda x: x.amax((2, 3)), [IMAGE]),
    "amin_h": (lambda x: x.amin(2), [IMAGE]),
    "max": (lambda x: x.max() + x.min(), [IMAGE]),
    "aminmax": (lambda x: torch.stack(torch.aminmax(x.detach())), [IMAGE]),  # torch 2.11 has no derivative of it
    "aminmax_w": (lambda x: torch.cat(torch.aminmax(x.detach(), dim=3, keepdim=True), 1), [IMAGE]),
    "max_c": (lambda x: x.max(1).values, [IMAGE]),
    "argmax_c": (lambda x: x.detach().argmax(1), [IMAGE]),
    "any": (lambda x: (x.detach() > 2).any(), [IMAGE]),
    "all_hw": (lambda x: (x.detach() > -2).all(3), [IMAGE]),
    "is_true": (
        lambda x: torch._is_all_true(x.detach() > -2).logical_or(torch._is_any_true(x.detach() > 9)),
        [IMAGE],
    ),
    "bincount": (lambda x: torch.bincount(labels_of(x).flatten()), [IMAGE]),
    "bincount_weighted": (
        lambda x: torch.bincount(labels_of(x).flatten(), x.detach()[:, 0].flatten(), minlength=2),
        [IMAGE],
    ),
    "histc": (lambda x: torch.histc(x.detach()), [IMAGE]),
    "histc_of_a_range": (lambda x: torch.histc(x.detach(), bins=7, min=-1, max=0.5), [IMAGE]),
    "histc_of_one_number": (lambda x: torch.histc(x.detach() * 0 + 3, bins=5), [IMAGE]),
    "norm": (lambda x: torch.linalg.vector_norm(x), [IMAGE]),
    "norm_one": (lambda x: x.norm(p=1, dim=(2, 3)), [IMAGE]),
    "norm_inf": (lambda x: torch.linalg.vector_norm(x.detach(), torch.inf), [IMAGE]),
    "softmax": (lambda x: x.softmax(1), [IMAGE]),
    "log_softmax": (lambda x: x.log_softmax(1), [IMAGE]),
    "softmax_w": (lambda x: x.softmax(3), [IMAGE]),
    "softmax_h": (lambda x: x.mul(30).softmax(-2), [IMAGE]),
    "softmax_few": (lambda x: x[..., :2].softmax(3), [IMAGE]),  # some ranks hold none
    "softmax_masked": (lambda x: x.masked_fill(torch.arange(11) < 7, -torch.inf).softmax(3), [IMAGE]),
    "log_softmax_w": (lambda x: x.mul(30).log_softmax(3), [IMAGE]),
    "logsumexp_c": (lambda x: x.logsumexp(1), [IMAGE]),
    "logsumexp_hw": (lambda x: x.mul(30).logsumexp((2, 3)), [IMAGE]),
    "logsumexp_w": (lambda x: x.logsumexp(3, keepdim=True) * x, [IMAGE]),
    "logsumexp_inf": (lambda x: torch.full_like(x, -torch.inf).logsumexp(3).exp() + x.sum(3), [IMAGE]),
    "normalize": (lambda x: F.normalize(x, dim=1), [IMAGE]),
    "gather_c": (lambda x: x.gather(1, labels().unsqueeze(1)), [IMAGE]),
    "cumsum_c": (lambda x: x.cumsum(1).sin(), [IMAGE]),
}
ALONG = {
    "cumsum_w": (lambda x: x.cumsum(3).sin(), [IMAGE]),
    "cumsum_h": (lambda x: x.cumsum(-2).sin(), [IMAGE]),
    "box_filter": (lambda x: x.cumsum(2).cumsum(3)[..., 2:, 2:] * x[..., 2:, 2:], [IMAGE]),
    "cumprod_w": (lambda x: x.detach().cumprod(3), [IMAGE]),
    "logcumsumexp_h": (lambda x: x.logcumsumexp(2), [IMAGE]),
    "sort_w": (lambda x: x.sort(3, descending=True).values * 2, [IMAGE]),
    "argsort_w": (lambda x: x.detach().argsort(3), [IMAGE]),
    "topk_w": (lambda x: x.topk(4, 3).values, [IMAGE]),
    "topk_1": (lambda x: x.topk(1, 2).values * x, [IMAGE]),
    "max_w": (lambda x: x.max(3).values, [IMAGE]),
    "min_h_keepdim": (lambda x: x.min(2, keepdim=True).values * x, [IMAGE]),
    "argmax_w": (lambda x: x.detach().argmax(3), [IMAGE]),
    "median_w": (lambda x: x.median(3).values, [IMAGE]),
    "kthvalue_h": (lambda x: x.kthvalue(3, 2, keepdim=True).values, [IMAGE]),
    "cummax_w": (lambda x: x.cummax(3).values, [IMAGE]),
    "prod_w": (lambda x: x.detach().prod(3), [IMAGE]),
    "any_masked_sort": (lambda x: (x.detach() > 0).sort(3).values, [IMAGE]),
    "sort_two_channels": (lambda x: x[:1, :2].sort(3).values, [IMAGE]),
    "gather_w": (lambda x: x.gather(3, x.detach().argsort(3)), [IMAGE]),
    "gather_some_w": (lambda x: x.gather(3, x.detach().argsort(3)[..., :5]), [IMAGE]),
    "scatter_h": (lambda x: torch.zeros_like(x).scatter(2, x.detach().argsort(2), x), [IMAGE]),
    "rfft2": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[-2:]) * x, [IMAGE]),
    "rfft_w": (lambda x: torch.view_as_real(torch.fft.rfft(x, dim=-1, norm="ortho")), [IMAGE]),
    "fft_h": (lambda x: torch.fft.ifft(torch.fft.fft(x, dim=2).mul(1j), dim=2).imag, [IMAGE]),
    "fft_some": (lambda x: torch.fft.fft2(x[..., :2]).abs(), [IMAGE]),  # some ranks hold none
    "fft_c": (lambda x: torch.fft.fft(x, dim=1).real, [IMAGE]),
    "hfft_w": (lambda x: torch.fft.hfft(x, n=11, dim=3), [IMAGE]),
    "fftshift": (lambda x: torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1)).real, [IMAGE]),
}


def pixels(x):
    return x.permute(0, 2, 3, 1).reshape(-1, x.size(1))


LOSSES = {
    "mse": (lambda x, y: F.mse_loss(x, y), [IMAGE, IMAGE]),
    "mse_sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), [IMAGE, IMAGE]),
    "mse_none": (lambda x, y: F.mse_loss(x, y, reduction="none"), [IMAGE, IMAGE]),
    "mse_plain": (lambda x: F.mse_loss(x, torch.ones(IMAGE).double()), [IMAGE]),
    "l1": (lambda x, y: F.l1_loss(x, y), [IMAGE, IMAGE]),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.7), [IMAGE, IMAGE]),
    "huber": (lambda x, y: F.huber_loss(x, y), [IMAGE, IMAGE]),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid()), [IMAGE, IMAGE]),
    "bce_logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach().sigmoid()), [IMAGE, IMAGE]),
    "bce_pos_weight": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, torch.full(IMAGE, 0.3).double(), pos_weight=weights().view(4, 1, 1)
        ),
        [IMAGE],
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x, labels()), [IMAGE]),
    "cross_entropy_sum": (lambda x: F.cross_entropy(x, labels(), reduction="sum"), [IMAGE]),
    "cross_entropy_none": (lambda x: F.cross_entropy(x, labels(), reduction="none"), [IMAGE]),
    "cross_entropy_weighted": (lambda x: F.cross_entropy(x, labels(), weights(), ignore_index=1), [IMAGE]),
    "cross_entropy_of_pixels": (lambda x: F.cross_entropy(pixels(x), labels().view(-1)), [IMAGE]),
    "cross_entropy_of_pixels_weighted": (
        lambda x: F.cross_entropy(pixels(x), labels().view(-1), weights(), ignore_index=1, label_smoothing=0.1),
        [IMAGE],
    ),
    "cross_entropy_of_pixels_none": (
        lambda x: F.cross_entropy(pixels(x), labels().view(-1), weights(), reduction="none").sin(),
        [IMAGE],
    ),
    "cross_entropy_of_valid_pixels": (
        lambda x: F.cross_entropy(pixels(x)[labels().view(-1) > 0], labels().view(-1)[labels().view(-1) > 0]),
        [IMAGE],
    ),
    "cross_entropy_of_lines": (lambda x: F.cross_entropy(x.flatten(2), labels().flatten(1), weights()), [IMAGE]),
    "cross_entropy_of_a_volume": (lambda x: F.cross_entropy(volume(x), voxels(), weights(), ignore_index=1), [IMAGE]),
    "cross_entropy_of_a_volume_sum": (lambda x: F.cross_entropy(volume(x), voxels(), reduction="sum"), [IMAGE]),
    "cross_entropy_of_a_volume_smooth": (
        lambda x: F.cross_entropy(volume(x), voxels(), reduction="none", label_smoothing=0.1).sin(),
        [IMAGE],
    ),
    "cross_entropy_smooth": (lambda x: F.cross_entropy(x, labels(), label_smoothing=0.1), [IMAGE]),
    "cross_entropy_soft": (lambda x, y: F.cross_entropy(x, y.detach().softmax(1)), [IMAGE, IMAGE]),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(1), y.detach().softmax(1)), [IMAGE, IMAGE]),
    "dice": (lambda x, y: 1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()), [IMAGE, IMAGE]),
}
POINTWISE = {
    "hardswish": (F.hardswish, [IMAGE]),
    "hardsigmoid": (F.hardsigmoid, [IMAGE]),
    "relu6": (F.relu6, [IMAGE]),
    "leaky_relu": (F.leaky_relu, [IMAGE]),
    "elu": (F.elu, [IMAGE]),
    "gelu": (F.gelu, [IMAGE]),
    "silu": (F.silu, [IMAGE]),
    "mish": (F.mish, [IMAGE]),
    "softplus": (F.softplus, [IMAGE]),
    "celu": (F.celu, [IMAGE]),
    "logsigmoid": (F.logsigmoid, [IMAGE]),
    "glu": (lambda x: F.glu(x, 1), [IMAGE]),
    "sigmoid_tanh": (lambda x: x.sigmoid() * x.tanh(), [IMAGE]),
    "in_place": (lambda x: F.relu(x * 1.0, inplace=True).mul(2).add_(x).mul_(2).clamp_(-1, 1), [IMAGE]),
    "in_place_hard": (lambda x: F.hardswish(x * 1.0, inplace=True), [IMAGE]),
    "plain_buffer": (lambda x: x * torch.linspace(0, 1, 11).double() + torch.ones(4, 1, 1).double(), [IMAGE]),
    "plain_full": (lambda x: torch.arange(99.0).double().view(9, 11) - x, [IMAGE]),
    "where": (lambda x: torch.where(x > 0, x, torch.zeros(()).double()), [IMAGE]),
    "masked_fill": (lambda x: x.masked_fill(torch.ones(9, 11).triu().bool(), 2.0), [IMAGE]),
    "scale_map": (lambda x, s: x * s, [IMAGE, (2, 4, 1, 1)]),
    "gate": (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), [IMAGE]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), [IMAGE, IMAGE]),
    "fake_quantize": (lambda x: torch.fake_quantize_per_tensor_affine(x * 3, 0.1, 3, 0, 20).sin(), [IMAGE]),
    "fake_quantize_by_tensors": (
        lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.full((1,), 0.2), torch.ones(1, dtype=torch.int32), -8, 7
        ),
        [IMAGE],
    ),
    "bucketize": (
        lambda x: (
            torch.bucketize(x.detach(), weights(), right=True)
            + 10 * torch.searchsorted(weights(), x.detach(), out_int32=True)
        ),
        [IMAGE],
    ),
    "pow": (lambda x: x.square().add(1).pow(1.5), [IMAGE]),
}
CASES = REDUCTIONS | ALONG | LOSSES | POINTWISE
ONCE = {"max", "amax", "amin_h", "norm_inf", "hardsigmoid"}  # what is not smooth has no second derivative to compare


def run_case(name, mesh, kwargs):
    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), range(len(mesh[0])))
    torch.manual_seed(0)
    fn, shapes = CASES[name]
    inputs = [torch.randn(shape).double() for shape in shapes]
    check(fn, mesh, inputs, double=name not in ONCE, **kwargs)


@pytest.mark.parametrize("mesh", [W3, HW], ids=["w3", "h2_w2"])
@pytest.mark.parametrize("name", CASES)
def test_elementwise_and_reducing_ops_match_reference_without_a_gather(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh, {})


@pytest.mark.parametrize("name", ["mean", "mean_hw", "var", "mse", "cross_entropy_weighted", "gate"])
def test_a_cut_batch_counts_too(name):
    run_ranks(run_case, num_ranks(DATA_W), name, DATA_W, {})


# Tokens in the order of what they are pooled over, as a pyramid of attention has them: the dim that is cut is the short one.
FEW = {
    "amax": lambda x: x.unflatten(2, (3, 4)).amax(2),
    "mean": lambda x: x.unflatten(2, (4, 3)).mean(2, keepdim=True),
    "var": lambda x: x.unflatten(2, (2, 6)).var(2),
    "norm": lambda x: torch.linalg.vector_norm(x.unflatten(2, (3, 2, 2)), dim=2),
    "any": lambda x: (x.detach() > 1).unflatten(2, (6, 2)).any(2),
    "max": lambda x: x.unflatten(2, (3, 4)).max(2).values,
    "median": lambda x: x.unflatten(2, (3, 4)).median(2, keepdim=True).values,
    "argmax": lambda x: x.detach().unflatten(2, (3, 4)).argmax(2),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).unflatten(1, (4, 3, 11)).sum(1),
}


def run_few(name, mesh):
    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), range(len(mesh[0])))
    torch.manual_seed(0)
    check(
        FEW[name],
        mesh,
        [torch.randn(2, 4, 12, 11).double()],
        double=name not in ("amax", "max", "median"),
        cut_output=True,
    )


@pytest.mark.parametrize("mesh", [H2, H3, HW], ids=["h2", "h3", "h2_w2"])
@pytest.mark.parametrize("name", FEW)
def test_what_is_reduced_over_few_rows_stays_cut(name, mesh):
    run_ranks(run_few, num_ranks(mesh), name, mesh)


def run_gradients_of_sums():
    """Placements of gradients of a cut tensor by way of sums, means, extremes and rows of it."""
    device_mesh = init_device_mesh("cpu", (2, 2))
    torchtp.dtensor.mark(device_mesh, [1])
    tensor = distribute_tensor(torch.randn(IMAGE).double(), device_mesh, [Shard(0), Shard(2)], src_data_rank=None)
    seen = []
    sums = [
        lambda x: x.mean(), lambda x: x.sum((2, 3)), lambda x: x.mean((1, 2, 3), keepdim=True),
        lambda x: x.sum(2), lambda x: x.sum(3), lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: x[:, :, 4],
        lambda x: x[:, :, -2:].sum(2), lambda x: x.amax((2, 3)),
    ]  # fmt: skip
    for function in sums:
        x = (tensor * 1).requires_grad_()
        function(x).pow(2).sum().backward()
        seen.append(tuple(x.grad.placements))
    return seen


def test_gradient_of_a_sum_or_a_row_is_cut_as_what_it_is_of():
    assert run_ranks(run_gradients_of_sums, 4) == [[(Shard(0), Shard(2))] * 9] * 4


def run_sums_of_one_shape():
    device_mesh = init_device_mesh("cpu", (2,))
    torchtp.dtensor.mark(device_mesh, [0])
    image = torch.randn(1, 4, 6, 6).double()
    made = [[Shard(2)], [Replicate()], [Shard(3)], [Shard(2)]]
    tensors = [distribute_tensor(image, device_mesh, place, src_data_rank=None).requires_grad_() for place in made]
    with torchtp.strict():
        sum((i + 1) * t.mean() for i, t in enumerate(tensors)).backward()
    return [float((t.grad.full_tensor() - (i + 1) / image.numel()).abs().max()) for i, t in enumerate(tensors)]


def test_sums_of_tensors_of_one_shape_that_are_cut_otherwise():
    for errors in run_ranks(run_sums_of_one_shape, 2):
        assert all(error < 1e-15 for error in errors), errors


def run_prelu():
    torchtp.dtensor.mark(init_device_mesh("cpu", (2,)), [0])
    torch.manual_seed(0)
    check(F.prelu, W2, [torch.randn(IMAGE).double()], [torch.rand(4).double()], plain=False)


def test_prelu_matches_reference():
    run_ranks(run_prelu, 2)


def run_narrow():
    """Values whose sums fp16 cannot hold, while it holds their means."""
    mesh = init_device_mesh("cpu", (2,))
    torchtp.dtensor.mark(mesh, [0])
    x = torch.full((1, 2, 16, 16), 200.0, dtype=torch.float16)
    cut = distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None)
    functions = [
        lambda x: F.mse_loss(x, torch.zeros_like(x)),
        lambda x: F.huber_loss(x, torch.zeros_like(x)),
        lambda x: F.avg_pool2d(200 * x, 3, 1, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(200 * x, 3, 2, 1, ceil_mode=True),
    ]
    whole = [function(cut) for function in functions]
    return [torch.equal(y.full_tensor(), f(x)) for y, f in zip(whole, functions, strict=True)]


def test_means_of_large_numbers_of_16_bit_do_not_overflow():
    assert run_ranks(run_narrow, 2) == [[True] * 4] * 2


def run_item():
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(99.0).view(1, 1, 9, 11)
    mine = distribute_tensor(x, mesh, [Shard(3)], src_data_rank=None)
    return mine.sum().item(), float(mine.mean()), x.sum().item(), x.mean().item()


def test_item_is_the_value_of_the_whole():
    for got_sum, got_mean, want_sum, want_mean in run_ranks(run_item, 2):
        assert got_sum == want_sum
        assert got_mean == pytest.approx(want_mean, rel=1e-6)


def run_equal():
    mesh = init_device_mesh("cpu", (2,))
    torchtp.dtensor.mark(mesh, [0])
    x = torch.arange(99.0).view(1, 1, 9, 11)
    others = [x.clone(), x.clone(), x.clone(), x[..., :10]]
    others[1][0, 0, 3, 2], others[2][0, 0, 8, 10] = -1, torch.nan  # each on another rank
    cut = distribute_tensor(x, mesh, [Shard(3)], src_data_rank=None)
    along_h = [distribute_tensor(other, mesh, [Shard(2)], src_data_rank=None) for other in others]
    with torchtp.strict():
        return [(torch.equal(cut, other), torch.equal(part, cut)) for other, part in zip(others, along_h, strict=True)]


def test_all_ranks_hear_whether_tensors_are_equal():
    assert run_ranks(run_equal, 2) == [[(True, True), (False, False), (False, False), (False, False)]] * 2


def run_counts_refused():
    mesh = init_device_mesh("cpu", (2,))
    torchtp.dtensor.mark(mesh, [0])
    values = distribute_tensor(torch.tensor([3, 1, 2, -4]), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.bincount(values)
    endless = distribute_tensor(torch.tensor([3, 1, 2, torch.inf]), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(RuntimeError, match="not finite"):
        torch.histc(endless)
    return torch.histc(endless, 4, 0, 4).tolist()


def test_what_one_rank_can_not_count_is_refused_by_all():
    assert run_ranks(run_counts_refused, 2) == [[0, 1, 1, 1]] * 2
