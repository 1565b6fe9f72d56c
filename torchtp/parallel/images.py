"""What goes into a parallelized module and what comes out: which tensors are images, their cut, the form of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree as pytree

from torchtp.dtensor.moving import Recut
from torchtp.dtensor.upstream import is_plain, local_of, make_dtensor, plain_shard, spec_of
from torchtp.dtensor.whole import Gather, Given, told_format, writable
from torchtp.layout import Layout
from torchtp.parallel import lazy
from torchtp.parallel.agreement import Described
from torchtp.parallel.arguments import Arguments
from torchtp.parallel.samples import Samples, samples_of

Output = Literal["dtensor", "local", "full"]

_IMAGE = "an image"
_PLAIN = (bool, int, float, str)  # what arguments are that steer a forward


class Images:
    """Cuts images among the arguments of a call as the layout says, and gives outputs the wanted form."""

    def __init__(self, layout: Layout, output: Output):
        self._layout = layout
        self._output = output

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Described], str]:
        """All tensors, numbers and words among the arguments, their keywords, and what is wrong with them."""
        tensors: list[Described] = []
        try:
            num_dims = self._num_dims(args, kwargs)
            for leaf in pytree.tree_leaves((args, kwargs)):
                if not isinstance(leaf, torch.Tensor):
                    if isinstance(leaf, _PLAIN):
                        tensors.append((_in_words(leaf), torch.Size(), None))
                    continue
                image = isinstance(leaf, DTensor) or leaf.dim() == num_dims
                if image:
                    self._layout.check(leaf)
                what = (_IMAGE if image else "a tensor") + (" that takes a gradient" if _records(leaf) else "")
                tensors.append((what + told_format(leaf), leaf.shape, leaf.dtype))
            if kwargs:
                tensors.append((f"the keywords {', '.join(map(repr, kwargs))}", torch.Size(), None))
        except ValueError as error:
            return [], str(error)
        except (RuntimeError, TypeError) as error:
            # Of what this rank alone may have been given: the others wait for its message.
            return [], f"an argument can't be described: {type(error).__name__}: {error}"
        return tensors, ""

    def samples(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, of_devices: bool) -> Samples:
        """Some elements of each tensor among what `describe` tells that every rank holds whole, of those on devices if asked for."""

        def held(leaf: torch.Tensor) -> torch.Tensor | None:
            if isinstance(leaf, DTensor):
                if not all(place.is_replicate() for place in leaf.placements):
                    return None
                leaf = local_of(leaf)
            return leaf if of_devices or leaf.device.type == "cpu" else None

        def held_of(leaf: Any) -> torch.Tensor | None:
            if isinstance(leaf, torch.Tensor):
                return held(leaf)
            return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else None

        leaves = pytree.tree_leaves((args, kwargs))
        told = [held_of(leaf) for leaf in leaves if isinstance(leaf, (torch.Tensor, *_PLAIN))]
        return samples_of([*told, None] if kwargs else told)

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments with the images cut; without communication."""
        num_dims = self._num_dims(args, kwargs)

        def cut(leaf: torch.Tensor) -> torch.Tensor:
            if isinstance(leaf, DTensor):
                # Of one made outside of inference mode PyTorch can't take a view in it.
                stale = torch.is_inference_mode_enabled() and not leaf.is_inference()
                return make_dtensor(local_of(leaf), spec_of(leaf)) if stale else leaf
            if leaf.dim() == num_dims:
                return self._layout.shard(leaf)
            return Given.apply(leaf, self._layout.spatial_mesh) if _records(leaf) else leaf

        return Arguments(args, kwargs, cut)

    def give(self, outputs: Any, described: Sequence[Described]) -> Any:
        """The outputs of a call with such arguments in the form that is wanted; collective if that is "full"."""
        images = [shape for what, shape, _ in described if what.startswith(_IMAGE)]

        def give(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return lazy.given_out(leaf)
            if self._output == "full":
                return writable(Gather.apply(leaf))
            leaf = self._cut_as_images(leaf, images)
            if self._output == "local":
                # Vectors of the images (logits) may be cut along the batch, of which nothing tells a rank its part.
                vectors = not self._layout.reaches(leaf.dim()) and any(leaf.shape[:1] == image[:1] for image in images)
                whole = tuple(
                    Replicate() if isinstance(p, Partial) or (vectors and plain_shard(p) and p.dim == 0) else p
                    for p in leaf.placements
                )
                return writable((leaf if whole == leaf.placements else leaf.redistribute(placements=whole)).to_local())
            return leaf

        leaves, structure = pytree.tree_flatten(outputs)
        given = [give(leaf) for leaf in leaves]
        if all(now is before for now, before in zip(given, leaves, strict=True)):
            return outputs  # a list that a module keeps and returns stays the one it keeps
        return pytree.tree_unflatten(given, structure)

    def _num_dims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Dims of the plain tensors that are images: the most that any has."""
        plain = (leaf.dim() for leaf in pytree.tree_leaves((args, kwargs)) if is_plain(leaf))
        return max(filter(self._layout.reaches, plain), default=None)

    def _cut_as_images(self, leaf: DTensor, images: list[torch.Size]) -> DTensor:
        """An image that went through a sequence of its pixels, say, may be cut along another dim than the layout says."""
        if leaf.device_mesh != self._layout.spatial_mesh or not self._layout.reaches(leaf.dim()):
            return leaf
        return cut_as_images(leaf, self._layout.placements(leaf.dim()), images)


def cut_as_images(leaf: DTensor, placements: Sequence[Placement], images: Sequence[Sequence[int]]) -> DTensor:
    """An output, cut as `placements` say if it looks like one of the images of these shapes."""
    wanted = tuple(own if plain_shard(place) else place for place, own in zip(leaf.placements, placements, strict=True))
    if wanted == leaf.placements or not any(_looks_like(leaf.shape, image) for image in images):
        return leaf
    return Recut.apply(leaf, wanted)


def _in_words(value: bool | int | float | str) -> str:
    """What ranks compare to the bit; floats as tensors are, for ranks may have computed them."""
    return "a float" if isinstance(value, float) else f"{type(value).__name__} {str(value)[:80]!r}"


def is_image(described: Described) -> bool:
    """Whether that is an image among the tensors that `Images.describe` told of."""
    return described[0].startswith(_IMAGE)


def _looks_like(shape: torch.Size, image: Sequence[int]) -> bool:
    """Whether an output of that shape is an image: of as many dims, or without channels and of the same proportions."""
    if len(shape) == len(image):
        return True
    sides = list(zip(shape[1:], image[2:], strict=False))
    return len(shape) == len(image) - 1 and all(a * sides[0][1] == b * sides[0][0] for a, b in sides)


def _records(tensor: torch.Tensor) -> bool:
    """Whether a gradient comes back to a tensor among the arguments: by a collective, which all ranks take part in."""
    return tensor.requires_grad and torch.is_grad_enabled()
