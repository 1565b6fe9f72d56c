"""LSTM, GRU and plain recurrent layers over rows and columns of cut images equal the single device; sequences are not gathered."""

from __future__ import annotations

import pytest
import torch
from models import make_layout
from rules import H4, HW, W2, W3, check, device_mesh_of, num_ranks

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 3, 5, 7)
HIDDEN = 4


def parameters_of(gates, layers=1, both_ways=False, channels=3):
    """Shapes, as nn.LSTM has them."""
    shapes = []
    for layer in range(layers):
        width = channels if layer == 0 else HIDDEN * (2 if both_ways else 1)
        for _ in range(2 if both_ways else 1):
            shapes += [(gates * HIDDEN, width), (gates * HIDDEN, HIDDEN), (gates * HIDDEN,), (gates * HIDDEN,)]
    return shapes


def rows(x):
    """[N * H, W, C]"""
    return x.permute(0, 2, 3, 1).flatten(0, 1)


def columns(x):
    """[H, N * W, C], sequence first"""
    return x.permute(2, 0, 3, 1).flatten(1, 2)


def zeros(y, layers=1, batch=0):
    return torch.zeros(layers, y.size(batch), HIDDEN, dtype=y.dtype)


def lstm_of_rows(x, *p):
    y = rows(x)
    output, h, c = torch.lstm(y, (zeros(y, 4), zeros(y, 4)), list(p), True, 2, 0.0, True, True, True)
    return output.sin() * (h.sum(0) + c[0])[:, None].repeat(1, 1, 2)


def lstm_of_columns(x, *p):
    y = columns(x)
    return torch.lstm(y, (zeros(y, batch=1), zeros(y, batch=1)), list(p), True, 1, 0.0, True, False, False)[0].sin()


def gru_with_a_first_state(x, *p):
    y = rows(x)
    first = y[:, 0] @ p[1][:3, :]  # a state of each sequence's own
    output, last = torch.gru(y, first[None].sin(), list(p), True, 1, 0.0, True, False, True)
    return output + last[0][:, None]


def gru_with_a_learned_state(x, state, *p):
    y = rows(x)
    return torch.gru(y, state.expand(1, y.size(0), -1).contiguous(), list(p), True, 1, 0.0, False, False, True)[0]


def plain_of_rows(x, *p):
    return torch.rnn_tanh(rows(x), zeros(rows(x)), list(p), True, 1, 0.0, True, False, True)[0]


def rectified_of_columns(x, *p):
    return torch.rnn_relu(columns(x), zeros(columns(x), batch=1), list(p), True, 1, 0.0, True, False, False)[1]


CASES = {
    "lstm_of_rows": (lstm_of_rows, parameters_of(4, 2, True)),
    "lstm_of_columns": (lstm_of_columns, parameters_of(4)),
    "gru_with_a_first_state": (gru_with_a_first_state, parameters_of(3)),
    "gru_with_a_learned_state": (gru_with_a_learned_state, [(1, 1, HIDDEN), *parameters_of(3)]),
    "plain_of_rows": (plain_of_rows, parameters_of(1)),
    "rectified_of_columns": (rectified_of_columns, parameters_of(1)),
}
SECOND = {"plain_of_rows", "lstm_of_columns"}


def run_case(name, mesh, plain):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), range(len(mesh[0])))
    fn, shapes = CASES[name]
    generator = torch.Generator().manual_seed(1)
    image, *parameters = (torch.randn(s, generator=generator, dtype=torch.float64) for s in [IMAGE, *shapes])
    check(
        fn,
        mesh,
        [image],
        parameters,
        plain,
        double=name in SECOND and mesh == W2,
        gathers=name in SECOND and mesh == W2,
    )


@pytest.mark.parametrize("mesh", [W2, W3, H4, HW], ids=["w2", "w3", "h4", "h2_w2"])
@pytest.mark.parametrize("name", CASES)
def test_recurrent_layers(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh, True)


@pytest.mark.parametrize("name", CASES)
def test_replicated_parameters(name):
    run_ranks(run_case, 4, name, HW, False)


class Reader(torch.nn.Module):
    """A text recognizer: columns of a pooled image as one sequence."""

    def __init__(self):
        super().__init__()
        self.features = torch.nn.Conv2d(1, 6, 3, padding=1)
        self.rnn = torch.nn.LSTM(6, 5, 2, bidirectional=True)
        self.head = torch.nn.Linear(10, 3)

    def forward(self, x):
        y = self.features(x).relu().mean(2).permute(2, 0, 1)
        return self.head(self.rnn(y)[0])


def run_reader():
    torch.manual_seed(0)
    network, image = Reader().double(), torch.randn(1, 1, 8, 12, dtype=torch.float64)
    expected = network(image)
    with pytest.warns(torchtp.GatherWarning, match="aten.lstm"):
        told = torchtp.parallelize(network, make_layout({"w": 2}), output="full")(image)
    assert torch.allclose(told, expected, rtol=0, atol=1e-12)


def test_one_sequence_is_gathered_once_with_notice():
    run_ranks(run_reader, 2)


def test_what_is_gathered_is_told_beforehand():
    told = torchtp.explain(Reader(), (1, 1, 8, 12), {"w": 2})
    assert [(gather.op, gather.shape, gather.times) for gather in told.gathers] == [("aten.lstm.input", (12, 1, 6), 1)]
    assert not torchtp.explain(Reader(), (2, 1, 8, 12), {"w": 2}).gathers


class PackedReader(torch.nn.Module):
    """The same of images of several widths: sequences that end when theirs does."""

    def __init__(self, kind):
        super().__init__()
        self.features = torch.nn.Conv2d(1, 6, 3, padding=1)
        self.rnn = kind(6, 5, 2, bidirectional=True, batch_first=True)

    def forward(self, x, widths):
        y = self.features(x).relu().mean(2).transpose(1, 2)
        packed = torch.nn.utils.rnn.pack_padded_sequence(y, widths, batch_first=True, enforce_sorted=False)
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return y.sin()


def read(network, images, widths):
    images = images.clone().requires_grad_()
    output = network(images, widths)
    output.square().sum().backward()
    return [output.detach(), images.grad, *(parameter.grad for parameter in network.parameters())]


def run_packed(kind, axes):
    torch.manual_seed(0)
    network, images = PackedReader(kind).double(), torch.randn(3, 1, 8, 13, dtype=torch.float64)
    widths = torch.tensor([7, 12, 9])
    expected = read(network, images, widths)
    network.zero_grad()
    got = read(torchtp.parallelize(network, make_layout(axes), output="full"), images, widths)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.filterwarnings("ignore::torchtp.GatherWarning")
def test_packed_sequences(kind, axes):
    assert all(run_ranks(run_packed, 2 * len(axes), kind, axes))


class OfColumns(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.features = torch.nn.Conv2d(1, 6, 3, padding=1)
        self.rnn = kind(6, 5, 2, bidirectional=True)

    def forward(self, x):
        return self.rnn(self.features(x).permute(3, 0, 2, 1).flatten(1, 2))[0]


def step_under_autocast(network, image, forward, backward):
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        output = network(image)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        output.float().square().sum().backward()
    return [output.detach(), *(parameter.grad for parameter in network.parameters())]


def run_under_autocast(kind, forward, backward, axes):
    torch.manual_seed(0)
    network, image = OfColumns(kind), torch.randn(1, 1, 4, 12)  # four sequences: of three ranks one has none
    expected = step_under_autocast(network, image, forward, backward)
    got = step_under_autocast(torchtp.parallelize(network, make_layout(axes), output="full"), image, forward, backward)
    for mine, reference in zip(got, expected, strict=True):
        assert mine.dtype == reference.dtype
        assert (mine - reference).norm() < 0.05 * reference.norm()


@pytest.mark.parametrize("axes", [{"w": 2}, {"w": 3}], ids=str)
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("forward, backward", [(True, False), (True, True), (False, True)])
def test_under_autocast(kind, forward, backward, axes):
    run_ranks(run_under_autocast, axes["w"], kind, forward, backward, axes)
