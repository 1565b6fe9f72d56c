"""How tensors were cut that an op took a sum or a part of, whose gradients are to be cut alike, remembered for each mesh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from torchtp.dtensor.upstream import Placement, Replicate, in_backward

Placements = tuple[Placement, ...]

_MOST = 16384  # that are remembered, of shapes and of nodes: more than a step sums and slices


class Origins:
    """By the op that took something of them where autograd recorded it, else by shape, if all of that shape were cut alike.

    Autograd hands a derivative the shape of what its op read and nothing more. The node of an op is made just before its rule is
    asked, so the number of that node in its sequence, which the derivative knows, tells them apart.
    """

    def __init__(self) -> None:
        self._of_shape: dict[torch.Size, Placements | None] = {}  # None for good where two were cut differently
        self._of_node: dict[tuple[int, torch.Size], Placements] = {}

    def note(self, shape: torch.Size, placements: Placements, requires_grad: bool) -> None:
        """That a rule takes something of a tensor of that shape, which is placed so; whether autograd has made it a node.

        Of what every rank holds one rank alone may take something, to print it: that tells nothing of other tensors.
        """
        if requires_grad and torch.is_grad_enabled():
            self._of_node[torch.autograd._get_sequence_nr() - 1, shape] = placements
            _keep_few(self._of_node)
        if not in_backward() and not all(isinstance(placement, Replicate) for placement in placements):
            alike = self._of_shape.setdefault(shape, placements) == placements
            self._of_shape[shape] = placements if alike else None
            _keep_few(self._of_shape)

    def of(self, shape: torch.Size) -> Placements | None:
        """How the tensor of that shape was cut whose gradient autograd computes now on this thread, if that is known."""
        node = torch._C._current_autograd_node()
        if node is not None and (found := self._of_node.get((node._sequence_nr(), shape))) is not None:
            return found
        return self._of_shape.get(shape)

    def images_alike(self, num_images: int, extents: Sequence[int]) -> Placements | None:
        """How images of that number and those extents were cut, if all were cut alike."""
        sizes = [num_images, *extents]
        of = self._of_shape.items()
        found = {placements for shape, placements in of if len(shape) > 2 and [shape[0], *shape[2:]] == sizes}
        return found.pop() if len(found) == 1 else None


def _keep_few(known: dict[Any, Placements | None] | dict[Any, Placements]) -> None:
    if len(known) > _MOST:  # the oldest, many at once: a dict looks for its first key past all that were deleted
        for key in list(itertools.islice(known, _MOST // 4)):
            known.pop(key, None)
