"""When ranks compare what they hold, each of which takes time: at once, ever more rarely, but not too rarely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtp.layout import Layout

_BETWEEN_COMPARISONS = 64


class Comparisons:
    """Of one parallelized module; what they count is alike on all ranks that take part in them."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self.calls = 0
        self._trained = _Schedule()
        self._evaluated = _Schedule()

    def call(self) -> bool:
        """Count a call of the module by the ranks of an image; whether they compare values that lie on a device at it."""
        self.calls += 1
        return is_due(self.calls)

    def train(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compare what is trained among all ranks, all of which are in this forward."""

        def compare() -> None:
            trained = [(f"parameter {name!r}", one) for name, one in parameters if one.requires_grad]
            self._layout.agreement.check_parameters(trained)

        self._trained.keep(compare)
        self._evaluated.restart()  # parameters are others by then

    def evaluate(self, module: nn.Module) -> None:
        """Compare what is read without training, among the ranks of this image: others may not evaluate.

        What one of them has loaded alone would show in its part of the image only.
        """
        self._evaluated.keep(lambda: self._layout.agreement.check_parameters(list(_read(module)), of_one_image=True))


class _Schedule:
    def __init__(self) -> None:
        self._count = 0
        self._apart = False

    def keep(self, compare: Callable[[], Any]) -> None:
        """Compare if it is due, or if ranks were found apart and have not been found alike since."""
        self._count += 1
        if self._apart or is_due(self._count):
            self._apart = True
            compare()
            self._apart = False

    def restart(self) -> None:
        self._count = 0


def is_due(calls: int) -> bool:
    """Whether what takes time is compared at this call."""
    return calls & (calls - 1) == 0 or calls % _BETWEEN_COMPARISONS == 0


def _read(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the statistics of norms by name: other buffers may be a rank's own."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            yield f"parameter {name!r}", parameter
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            for each, buffer in part.named_buffers(name, recurse=False):
                yield f"buffer {each!r}", buffer
