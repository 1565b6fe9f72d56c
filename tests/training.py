"""How the tests train: the same images, loss and optimizer on one rank and on many."""

import torch
from models import make_network
from torch.distributed.tensor import DTensor

SHAPE = (2, 13, 17)  # channels, height, width of an image: uneven whatever it is cut into; odd for the U-Net


def make_images(step, num, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num, *SHAPE, generator=generator, dtype=dtype)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(output):
    return (whole(output) - 0.3).square().mean()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_single(network, steps, num, before_step=lambda model: None):
    model = make_network(network)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(make_images(step, num)))
        loss.backward()
        before_step(model)
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def assert_same_parameters(model, single):
    mine, theirs = model.state_dict(), single.state_dict()
    names = [name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "") for name in mine]
    assert names == list(theirs)
    for value, name in zip(mine.values(), names, strict=True):
        torch.testing.assert_close(
            whole(value), theirs[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text
        )


def assert_same_gradients(model, single):
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)
