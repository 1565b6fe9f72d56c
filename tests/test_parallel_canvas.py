"""Tensors that a forward makes by torch.zeros and its kin and fills with cut values: cut like these, exact, nothing gathered."""

import contextlib
import copy
import io

import numpy
import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from training import loss_of, make_images

import torchtp
from torchtp.testing import run_ranks


class Filler(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.fill = fill
        self.look = nn.Conv2d(2, 4, 3, padding=1)
        self.volume = nn.Conv3d(4, 2, 3, padding=1)
        self.token = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x):
        return self.fill(self, self.look(x))


def _zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def _cost_volume(m, y):
    volume = torch.zeros(y.size(0), 4, 5, 13, 17, dtype=y.dtype, device=y.device)
    for shift in range(5):
        if shift == 0:
            volume[:, :, 0] = y * y
        else:
            volume[:, :, shift, :, shift:] = y[..., shift:] * y[..., :-shift]
    return m.volume(volume)


def _cost_volume_of_old(m, y):
    cost = Variable(torch.DoubleTensor(y.size(0), 8, 3, 13, 17).zero_())
    for shift in range(3):
        cost[:, :4, shift, :, shift:] = y[..., shift:]
        cost[:, 4:, shift, :, shift:] = y[..., : 17 - shift].sin()
    other = Variable(torch.zeros(y.size(0), 4, 13, 17)).double()
    other[:] = y
    return m.volume(cost[:, 2:6]).sum(1) + m.volume(cost[:, 4:]).sum(1) * other[:, 1:].mean(1, keepdim=True)


def _of_numpy(m, y):
    memory = numpy.zeros((y.size(0), 4, 13, 17))
    wide = Variable(torch.from_numpy(memory))
    wide[:] = y.detach()
    return y * torch.from_numpy(memory)


def _inverse_wavelet(m, y):
    wide = torch.empty(y.size(0), 1, 26, 34, dtype=y.dtype)
    for band in range(4):
        wide[:, :, band // 2 :: 2, band % 2 :: 2] = y[:, band : band + 1]
    return F.avg_pool2d(wide, 3, 1, 1)


def _modes(m, y):
    spectrum = torch.fft.rfft2(y)
    kept = torch.zeros(y.size(0), 4, 13, 9, dtype=spectrum.dtype)
    kept[:, :, :4, :5] = spectrum[:, :, :4, :5] * 2
    kept[:, :, -4:, :5] = spectrum[:, :, -4:, :5] * m.token[:, None, None]
    return torch.fft.irfft2(kept, s=(13, 17))


def _sums(m, y):
    total = torch.zeros(y.size(0), 4, 13, 17).to(y)
    again = torch.zeros_like(torch.ones(y.size(0), 4, 13, 17).double())
    for times in range(3):
        total += y * times
        again.add_(y.relu(), alpha=2)
    copied = torch.empty(y.size(0), 4, 13, 17).type_as(y)
    copied.copy_(y.mean(1, keepdim=True))
    return total * again + copied


def _one_image_at_a_time(m, y):
    out = torch.full((y.size(0), 4, 13, 17), 0.5, dtype=y.dtype)
    for image in range(y.size(0)):
        out[image] = y[image].relu()
    out[:, -1] *= 2
    out[0, 1] += y[0, 2]
    return out


def _seen_before(m, y):
    canvas = _zeros(y.size(0), 4, 13, 17)
    view = canvas[:, :2]  # sees what is written into the canvas
    canvas[:, :, 2:5] = y[:, :, 2:5]
    return torch.cat([canvas, view * 3], 1)


def _saved_before(m, y):
    canvas = torch.ones(y.size(0), 4, 13, 17, dtype=torch.float64)
    product = m.token[:, None, None].exp() * canvas.clone()
    canvas[..., 3:] = y[..., 3:]
    return canvas * product


def _with_a_token(m, y):
    canvas = _zeros(y.size(0), 5, 13, 17)
    canvas[:, 0] = m.token[2]
    canvas[:, 1:] = y
    return canvas


def _broadcast(m, y):
    canvas = _zeros(y.size(0), 4, 13, 17)
    canvas[:] = y.mean((2, 3), keepdim=True)
    canvas[:, :, 1] = y[:, :, 1:2].mean(3)
    return canvas + y


def _by_list(m, y):
    canvas = _zeros(y.size(0), 4, 13, 17)
    canvas[:, [0, 2]] = y[:, :2]
    return canvas


def _never_written(m, y):
    return torch.cat([y, _zeros(y.size(0), 1, 13, 17)], 1) + torch.ones(1, 1, 1, dtype=torch.float64)


def _offloaded(m, y):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return m.volume((y * y.sin()).unsqueeze(2).exp())


def _recomputed(m, y):
    return checkpoint(_cost_volume, m, y, use_reentrant=False)


LOCAL = {
    "a cost volume": _cost_volume,
    "a cost volume of older programs": _cost_volume_of_old,
    "the inverse of a wavelet transform": _inverse_wavelet,
    "modes of a spectrum": _modes,
    "sums": _sums,
    "one image at a time": _one_image_at_a_time,
    "nothing written": _never_written,
    "a cost volume that is recomputed": _recomputed,
    "saved tensors in pinned memory": _offloaded,
}
GATHERED = {
    "memory of numpy": _of_numpy,
    "a view made before": _seen_before,
    "made before a product": _saved_before,
    "beside a token": _with_a_token,
    "something smaller": _broadcast,
    "lists": _by_list,
}


def _train(model):
    image = make_images(1, 2).requires_grad_()
    output = model(image)
    loss_of(output).backward()
    return [output.detach(), image.grad], [parameter.grad for parameter in model.parameters()]


def _run(name, axes):
    torch.manual_seed(0)
    single = Filler({**LOCAL, **GATHERED}[name]).double()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout(axes), output="full")
    expected = _train(single)
    with torchtp.strict() if name in LOCAL else contextlib.nullcontext():
        torch.testing.assert_close(_train(model), expected, rtol=1e-9, atol=1e-11)
        with torch.inference_mode():
            torch.testing.assert_close(model(make_images(3, 2)), single(make_images(3, 2)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 3}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("name", [*LOCAL, *GATHERED])
def test_what_a_forward_makes_and_fills_is_exact(name, axes):
    run_ranks(_run, torch.Size(axes.values()).numel(), name, axes)


class Tagged(torch.Tensor):
    """A class of a user's own."""


class Keeper(nn.Module):
    """Keeps what it made in an attribute, a buffer and a parameter, hands it to other programs, and returns it."""

    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(2, 2, 1)
        self.scripted, self.compiled = torch.jit.script(Adder()), torch.compile(Adder(), backend="aot_eager")
        self.register_buffer("last", None)
        self.register_parameter("gain", None)

    def forward(self, x):
        if self.last is None:
            self.kept = torch.zeros(1, 2, 3)
            self.last = torch.ones(1, 2, 3)
            self.gain = nn.Parameter(torch.ones(2, 1, 1, dtype=x.dtype))
        self.kept[0, 0] += 1
        self.last[0, 0] += 1
        made = torch.zeros(1, 2, 1, dtype=x.dtype)
        assert torch.einsum("abc,bd->ad", made, torch.ones(2, 2, dtype=x.dtype)).shape == (1, 2)
        assert type(torch.ones(3).as_subclass(Tagged) + made) is Tagged
        seen = self.look(x) * self.gain
        return self.scripted(seen, made) + self.compiled(seen, made), torch.zeros(1, 2, 3), self.kept + self.last


class Adder(nn.Module):
    def forward(self, x, made):
        return x + made.sum()


def _keep():
    model = torchtp.parallelize(Keeper().double(), make_layout({"w": 2}))
    for step in range(2):
        image, made, total = model(make_images(step, 2))
        assert isinstance(image, DTensor) and type(model.gain) is nn.Parameter
        assert type(made) is type(model.last) is torch.Tensor
        torch.testing.assert_close(total[0, 0], torch.full((3,), 3.0 + 2 * step))
    image.full_tensor().sum().backward()
    torch.testing.assert_close(model.gain.grad.flatten(), model.gain.grad.new_tensor(_gains(model, make_images(1, 2))))
    assert type(torch.zeros(1, 2, 3)) is torch.Tensor
    saved = io.BytesIO()
    torch.save(model.kept, saved)
    saved.seek(0)
    assert type(torch.load(saved)) is type(copy.deepcopy(model.kept)) is torch.Tensor


def _gains(model, image):
    return (2 * F.conv2d(image, model.look.weight, model.look.bias)).sum((0, 2, 3)).tolist()


def test_what_is_made_and_not_cut_stays_plain():
    run_ranks(_keep, 2)


def _default_device_and_script():
    torchtp.parallelize(nn.Conv2d(2, 2, 1), make_layout({"w": 2}))
    with torch.device("meta"):
        assert torch.zeros(2, 3, 4).is_meta

    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros([2, 3, 4], dtype=x.dtype)

    scripted(torch.ones(2, 3, 4))
    traced = torch.fx.symbolic_trace(lambda x: x + torch.zeros(2, 3, 4))
    assert "torch.zeros" in traced.code or "_tensor_constant" in traced.code
    return torch.compile(lambda x: x + torch.zeros(2, 3, 4), backend="eager", fullgraph=True)(torch.ones(1)).sum()


def test_what_pytorch_does_with_the_functions_goes_on():
    run_ranks(_default_device_and_script, 2)
