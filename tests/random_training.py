"""Random training programs: what people do between two steps, in combinations that nobody chose, on one device and on cut images."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from training import whole

import torchtp

NUM_STEPS = 6


class Block(nn.Module):
    """Adds what its layers make; in various ways that models are written."""

    def __init__(self, way: str, c: int, make: Callable[[], nn.Module]):
        super().__init__()
        self.way, self.layers = way, make()
        if way == "scaled":
            self.gamma = nn.Parameter(torch.rand(c, 1, 1))
        if way == "places":
            self.places = nn.Parameter(torch.randn(1, c, 40, 40) / 3)
        if way == "unused":
            self.unused = nn.Linear(3, 3)
        if way == "remembers":
            self.register_buffer("seen", torch.zeros(c, 1, 1))
        if way == "gated":
            self.gate = nn.Sequential(nn.Linear(c, c), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpointed":
            return x + checkpoint(self.layers, x, use_reentrant=False)
        if self.way == "checkpointed, reentrant":
            return x + checkpoint(self.layers, x, use_reentrant=True)
        if self.way == "twice":
            return x + self.layers(self.layers(x))
        if self.way == "scaled":
            return x + self.gamma * self.layers(x)
        if self.way == "places":
            return x + self.layers(x + self.places[..., : x.shape[-2], : x.shape[-1]])
        if self.way == "gated":
            return x + self.layers(x) * self.gate(x.mean((-2, -1)))[..., None, None]
        if self.way == "remembers":
            if self.training:
                with torch.no_grad():
                    self.seen.add_(1)
            return x + self.layers(x) / (1 + self.seen)
        if self.way == "sometimes" and x.shape[-1] % 2:
            return x
        return x + self.layers(x)


WAYS = ("plain", "checkpointed", "checkpointed, reentrant", "twice", "scaled", "places", "unused", "gated", "sometimes")


class Net(nn.Module):
    def __init__(self, draw: random.Random, alone: bool):
        super().__init__()
        c = draw.choice([2, 4])
        conv = lambda k=3: nn.Conv2d(c, c, k, padding=k // 2)  # noqa: E731
        choices: list[Callable[[], nn.Module]] = [
            lambda: nn.Sequential(conv(), nn.GELU()),
            lambda: nn.Sequential(conv(5), nn.GroupNorm(1, c)),
            lambda: nn.Sequential(nn.Conv2d(c, c, 7, padding=3, groups=c), nn.GroupNorm(2, c), conv(1), nn.SiLU()),
            lambda: parametrizations.weight_norm(conv()),
            lambda: nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(1)),
            lambda: Below(conv()),
            lambda: nn.Sequential(nn.PReLU(c), conv()),
        ]
        ways = WAYS
        # What one device would do with the images of several data ranks, one after the other, is another thing.
        if alone:
            ways = (*WAYS, "remembers")
            choices.append(lambda: parametrizations.spectral_norm(conv()))
            choices.append(lambda: nn.Sequential(conv(), nn.Dropout(0.2)))
            choices.append(lambda: nn.Sequential(nn.BatchNorm2d(c), nn.ELU()))
        self.stem = nn.Conv2d(2, c, 3, padding=1)
        self.blocks = nn.ModuleList(
            Block(draw.choice(ways), c, draw.choice(choices)) for _ in range(draw.randint(1, 4))
        )
        if draw.random() < 0.3:
            self.blocks.append(self.blocks[0])
        self.head = nn.Conv2d(c, 1, 1)
        self.classes, self.of_times = nn.Linear(c, 3), nn.Linear(1, c)

    def features(self, x: Tensor, times: Tensor | None) -> Tensor:
        x = self.stem(x)
        if times is not None:
            x = x + self.of_times(times[:, None])[..., None, None]
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, times: Tensor | None = None, *, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.features(x, times)
        x = x if mask is None else x.masked_fill(mask, 0.0)
        return {"map": self.head(x), "classes": self.classes(x.mean((-2, -1)))}


class Below(nn.Module):
    """On an image of half the size, as in a U-Net."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        small = self.layer(F.avg_pool2d(x, 2, 2, ceil_mode=True))
        return F.interpolate(small, size=x.shape[-2:], mode="bilinear")


class Ways:
    """What a program does, drawn from its seed: the same on one device and on all ranks."""

    def __init__(self, draw: random.Random):
        some = lambda chance: draw.random() < chance  # noqa: E731
        self.optimizer = draw.choice(list(OPTIMIZERS))
        self.accumulated = draw.choice([1, 1, 2, 3])
        self.no_sync = some(0.5)
        self.clip = draw.choice([None, None, "norm", "value", "by hand"])
        self.set_to_none = some(0.7)
        self.zero_by = draw.choice(["optimizer", "model"])
        self.output = draw.choice(["full", "dtensor", "local"])
        self.loss = draw.choice(["sum of both", "backward twice", "one of both", "classes alone at times"])
        self.penalty = some(0.15)
        self.scheduler = some(0.3)
        self.freeze_at = draw.choice([None, None, 1, 2])
        self.thaw_at = draw.choice([2, 3, 4])
        self.evaluate = some(0.4)
        self.average = some(0.3)
        self.copy_at = draw.choice([None, None, None, 2, 3])
        self.reload_at = draw.choice([None, None, 3])
        self.new_head_at = draw.choice([None, None, None, 3])
        self.hook = draw.choice([None, None, "clamp", "scale", "of a module", "post"])
        self.skip_at = draw.choice([None, None, 2])
        self.groups = some(0.3)
        self.cut_by_user = some(0.3)
        self.times, self.mask = some(0.3), some(0.3)
        if self.hook in ("clamp", "post") or self.new_head_at is not None:  # both ask for what is averaged
            self.no_sync = False
        if self.optimizer == "LBFGS":
            self.groups = False
            self.output = "full"  # it goes by the loss

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value not in (None, False))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class Program:
    """One run: of one device, where there is no layout, or of a rank."""

    def __init__(self, seed: int, layout: torchtp.Layout | None, num_data: int, noise: float = 0):
        draw = random.Random(seed)
        self.seed, self.layout, self.num_data, self.noise = seed, layout, num_data, noise
        self.ways = Ways(draw)
        torch.manual_seed(seed)
        self.model: Any = Net(draw, alone=num_data == 1).double()
        if layout is not None:
            self.model = torchtp.parallelize(self.model, layout, output=self.ways.output)
        self.averages = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.add_hooks()
        self.make_optimizer()
        self.seen: list[tuple[str, Tensor]] = []

    def add_hooks(self) -> None:
        hook, weight = self.ways.hook, self.model.stem.weight
        if hook == "clamp":
            weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        elif hook == "scale":
            weight.register_hook(lambda grad: 2 * grad)
        elif hook == "post":
            weight.register_post_accumulate_grad_hook(_halve)
        elif hook == "of a module":
            self.model.head.register_forward_hook(lambda module, args, output: output * 1.5)

    def make_optimizer(self) -> None:
        make = OPTIMIZERS[self.ways.optimizer]
        if self.ways.groups:
            biases = [p for name, p in self.model.named_parameters() if name.endswith("bias")]
            others = [p for name, p in self.model.named_parameters() if not name.endswith("bias")]
            self.optimizer = make([{"params": others}, {"params": biases, "lr": 0.002}])
        else:
            self.optimizer = make(self.model.parameters())
        self.scheduler = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, NUM_STEPS) if self.ways.scheduler else None
        )

    def note(self, name: str, tensor: Tensor) -> None:
        self.seen.append((name, whole(tensor.detach()).clone()))

    def images(self, number: int, data_rank: int) -> Tensor:
        """Of other numbers and sizes on each data rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * number + data_rank)
        n, h, w = (int(torch.randint(*limits, (), generator=generator)) for limits in ((1, 4), (6, 20), (6, 20)))
        images = torch.randn(n, 2, h, w, generator=generator, dtype=torch.float64) * (1 + self.noise)
        return self.layout.shard(images) if self.layout is not None and self.ways.cut_by_user else images

    def call(self, images: Tensor) -> dict[str, Tensor]:
        arguments = (torch.linspace(0, 1, len(images), dtype=torch.float64),) if self.ways.times else ()
        mask = None
        if self.ways.mask:
            h, w = images.shape[-2:]
            mask = (
                torch.arange(h)[:, None] + 2 * torch.arange(w) + torch.arange(len(images))[:, None, None, None]
            ) % 3 == 0
        output: dict[str, Tensor] = self.model(images, *arguments, mask=mask)
        return output

    def losses(self, number: int, step: int, data_rank: int) -> Iterator[Tensor]:
        """What is derived one after the other."""
        images = self.images(number, data_rank)
        output = self.call(images)
        of_map = (whole(output["map"]) - 0.3).square().sum() / (images.numel() // 2)
        of_classes = F.cross_entropy(whole(output["classes"]), torch.zeros(len(output["classes"]), dtype=torch.long))
        if self.ways.loss == "sum of both":
            yield of_map + of_classes
        elif self.ways.loss == "backward twice":
            yield of_map
            yield of_classes
        elif self.ways.loss == "one of both":
            yield of_map
        else:
            yield of_classes if (step + data_rank) % 2 else of_map + of_classes
        if (
            self.ways.penalty
            and self.num_data == 1
            and not any("reentrant" in block.way for block in self.model.blocks)
        ):
            image = self.images(number, data_rank).detach().requires_grad_()
            (grad,) = torch.autograd.grad(whole(self.call(image)["map"]).sum(), image, create_graph=True)
            yield 0.1 * whole(grad).square().mean()

    def backward(self, step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        data_ranks = range(self.num_data) if self.layout is None else [self.layout.data_rank]
        for part in range(self.ways.accumulated):
            last = part == self.ways.accumulated - 1
            quiet = self.layout is not None and self.ways.no_sync and not last
            with torchtp.no_sync(self.model) if quiet else contextlib.nullcontext():
                of_all = [list(self.losses(10 * step + part, step, data_rank)) for data_rank in data_ranks]
                for place, losses in enumerate(zip(*of_all, strict=True)):
                    loss = torch.stack(losses).mean()
                    (loss / self.ways.accumulated).backward(retain_graph=place < len(of_all[0]) - 1)
                    total = total + loss.detach()
        return total

    def clip(self) -> None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.ways.clip == "norm":
            self.note("norm", torch.nn.utils.clip_grad_norm_(parameters, 0.1))
        elif self.ways.clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.05)
        elif self.ways.clip == "by hand":
            for p in parameters:
                p.grad = p.grad / (1 + p.grad.norm())

    def zero(self) -> None:
        (self.optimizer if self.ways.zero_by == "optimizer" else self.model).zero_grad(
            set_to_none=self.ways.set_to_none
        )

    def step(self, step: int) -> None:
        def closure() -> Tensor:
            self.zero()
            loss = self.backward(step)
            self.clip()
            if self.num_data == 1 and self.ways.output != "local":
                self.note(f"loss {step}", loss)
            if self.layout is not None and self.num_data > 1:  # LBFGS goes by the loss: that of all images
                dist.all_reduce(loss, dist.ReduceOp.AVG)
            return loss

        if self.ways.optimizer == "LBFGS":
            self.optimizer.step(closure)
        else:
            closure()
            if step != self.ways.skip_at:
                self.optimizer.step()
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.note(f"gradient of {name} in step {step}", p.grad)

    def between(self, step: int) -> None:
        ways, model = self.ways, self.model
        if step == ways.freeze_at:
            model.stem.requires_grad_(False)
        if step == ways.thaw_at:
            model.stem.requires_grad_(True)
        if ways.evaluate:
            model.eval()
            with torch.no_grad():
                output = self.call(self.images(70 + step, 0))
            if ways.output != "local":
                self.note(f"evaluation {step}", output["map"])
            model.train()
        if step == ways.copy_at and ways.hook is None:
            self.model = copy.deepcopy(model)
            self.make_optimizer()
        if step == ways.reload_at:
            state = self.model.state_dict()
            self.model.load_state_dict({name: v * 0.9 if v.is_floating_point() else v for name, v in state.items()})
        if step == ways.new_head_at:
            torch.manual_seed(5)
            self.model.head = nn.Conv2d(self.model.head.in_channels, 1, 3, padding=1).double()
            self.make_optimizer()
        if ways.average:
            for name, p in self.model.named_parameters():
                before = self.averages.get(name, p.detach())
                self.averages[name] = p.detach().lerp(before, 0.7) if before.shape == p.shape else p.detach().clone()
        if self.scheduler is not None:
            self.scheduler.step()

    def run(self) -> list[tuple[str, Tensor]]:
        for step in range(NUM_STEPS):
            torch.manual_seed(step)
            self.step(step)
            self.between(step)
        for name, value in self.model.state_dict().items():
            self.note(name, value)
        for name, value in self.averages.items():
            self.note(f"average of {name}", value)
        return self.seen
