"""A training step on cut images, counted beforehand in one process: `explain`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtp.parallel.root import is_parallelized
from torchtp.planning.explanation import Collective, EmptyParts, Exchange, Explanation, Gather, RankCost
from torchtp.planning.rehearsal import Counts, Place, rehearse, without_data

DIMS = {"d": -3, "h": -2, "w": -1}
_MAX_ALL = 16  # ranks that are all rehearsed
_MAX_LINE = 32  # of more, those of one axis between its ends


def explain(
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    mesh: Mapping[str, int],
    *,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Tell what a training step of `module` would cost with images of `shape` cut over `mesh`, without running it.

    `shape` is that of the images a data rank passes, [N, C, ..., H, W], or one shape for each image of several. `mesh`
    gives the number of ranks on the axes that cut W, H and D ({"h": 2, "w": 2}), and over "data". `dtype` is what the
    module and its images are cast to, by default the module's own. Nothing is launched, and neither the module nor
    process groups, generators or warnings of the caller are touched: a forward and a backward of a copy run on tensors
    without data, for every rank. Of more than 16 ranks only those at both ends of each axis and next to them run, and
    between these at most 32 along each axis; the first is the fullest in any case, since no rank holds more rows of any
    tensor than the first of its axis. The module stays in training or evaluation mode, as it is.

    Raises ValueError for an unknown axis, a shape without the dims that are cut, a module that is parallelized already,
    has TorchScript inside, does not take such images, or needs to know its tensors' values (`if x.max() > 0`); TypeError for what is no module,
    shape or mesh.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"explain takes a torch.nn.Module, but the first argument is a {type(module).__name__}")
    shapes = _checked_shapes(shape)
    axes, dims = _checked_mesh(mesh, shapes)
    if any(is_parallelized(part) for part in module.modules()):
        raise ValueError("the module is parallelized already: call torchtp.explain before torchtp.parallelize")
    scripted = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise ValueError(
            f"torchtp.explain can't run TorchScript without data, and {scripted[0] or 'the module'} is such: give it the "
            "module that was scripted"
        )
    kind = dtype or next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
    single = _rehearsed(module, shapes, kind, dtype, {}, {}, ())
    counts = {
        coordinates: _rehearsed(module, shapes, kind, dtype, axes, dims, coordinates)
        for coordinates in _rehearsed_ranks(tuple(axes.values()))
    }
    return Explanation(
        shapes=shapes,
        dtype=kind,
        mesh=dict(mesh),
        single_bytes=single.kept_bytes,
        gradient_bytes=sum(p.nbytes for p in without_data(module, dtype).parameters() if p.requires_grad),
        ranks=tuple(
            RankCost(
                dict(zip(axes, coordinates, strict=True)),
                count.kept_bytes,
                count.exchanged_bytes.total(),
                count.num_exchanges.total(),
                count.collective_bytes.total(),
                count.num_collectives.total(),
            )
            for coordinates, count in counts.items()
        ),
        gathers=_gathers(counts.values()),
        exchanges=_exchanges(counts.values()),
        collectives=_collectives(counts.values()),
        empty=_empty(counts.values(), list(axes)),
    )


def _checked_shapes(shape: Sequence[int] | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"explain takes a shape, as (1, 3, 512, 512), or a list of such, but it is {shape!r}")
    several = any(isinstance(each, Sequence) for each in shape)
    given: Sequence[Any] = shape if several else [shape]
    shapes = tuple(tuple(each) if isinstance(each, Sequence) else () for each in given)
    if not all(each and all(isinstance(extent, int) and extent > 0 for extent in each) for each in shapes):
        raise ValueError(
            f"a shape has positive extents, as in (1, 3, 512, 512), or is a list of such, but it is {shape!r}"
        )
    return shapes


def _checked_mesh(
    mesh: Mapping[str, int], shapes: tuple[tuple[int, ...], ...]
) -> tuple[dict[str, int], dict[str, int]]:
    if not isinstance(mesh, Mapping):
        raise TypeError(f'explain takes a mesh as {{"h": 2, "w": 2}}, a dict of sizes, but it is {mesh!r}')
    for name, size in mesh.items():
        if name not in DIMS and name != "data":
            raise ValueError(f"the mesh has an axis {name!r}: give sizes of h, w, d (they cut H, W, D) and data")
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"axis {name!r} needs a number of ranks, but it has {size!r}")
    axes = {name: size for name, size in mesh.items() if name != "data"}
    if not axes:
        raise ValueError(f'no axis cuts an image: give h or w a size, as in {{"w": 2}}, not {dict(mesh)}')
    dims = {name: DIMS[name] for name in axes}
    for shape in shapes:
        if len(shape) < 2 - min(dims.values()):
            raise ValueError(
                f"an image of shape {shape} has no dims [N, C, ...] with those that {' and '.join(axes)} cut: give "
                "it a batch and a channel dim"
            )
    return axes, dims


def _rehearsed_ranks(sizes: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    if math.prod(sizes) <= _MAX_ALL:
        return itertools.product(*map(range, sizes))
    chosen = set(itertools.product(*({0, 1, size - 2, size - 1} & set(range(size)) for size in sizes)))
    # Where extents are no multiple of the ranks windows lie differently on each: any of an axis may send most.
    beside = tuple(min(1, size - 1) for size in sizes)
    for axis, size in enumerate(sizes):
        chosen |= {(*beside[:axis], at, *beside[axis + 1 :]) for at in _spread(range(2, size - 2))}
    return sorted(chosen)


def _spread(inside: range) -> list[int]:
    """As many as are rehearsed of one axis, evenly."""
    most = min(len(inside), _MAX_LINE)
    return [inside[number * len(inside) // most] for number in range(most)]


def _rehearsed(
    module: nn.Module,
    shapes: tuple[tuple[int, ...], ...],
    kind: torch.dtype,
    cast: torch.dtype | None,
    axes: dict[str, int],
    dims: dict[str, int],
    coordinates: tuple[int, ...],
) -> Counts:
    try:
        return rehearse(without_data(module, cast), shapes, kind, axes, dims, coordinates)
    except Exception as error:  # of the module's author, whatever it is
        where = "cut" if axes else "whole"
        what = ", ".join(map(str, shapes))
        raise ValueError(
            f"a step of {type(module).__name__} on {where} images of shape {what} without data fails: {_said(error)}\nIt must "
            "take such images, and neither ask for values of its tensors nor name a device"
        ) from error


def _said(error: Exception) -> str:
    """Kind and text of an error, without torch's stack frames."""
    text = re.split(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #\d)", str(error))[0].strip()
    quote = '"' if text.count('"') % 2 else ""  # which the frames stood within
    return f"{type(error).__name__}: {text}{quote}"


def _gathers(counts: Iterable[Counts]) -> tuple[Gather, ...]:
    first = next(iter(counts))  # a gather is collective: the same on all ranks
    return tuple(
        Gather(place.op, place.module, place.phase, shape, dtype, math.prod(shape) * dtype.itemsize, times)
        for (place, shape, dtype), times in first.gathers.items()
    )


def _exchanges(counts: Iterable[Counts]) -> tuple[Exchange, ...]:
    counts = list(counts)
    return tuple(
        Exchange(
            place.op,
            place.module,
            place.phase,
            max(count.exchanged_bytes[place] for count in counts),
            max(count.num_exchanges[place] for count in counts),
            max(count.num_beyond[place] for count in counts),
        )
        for place in _places(count.num_exchanges for count in counts)
    )


def _collectives(counts: Iterable[Counts]) -> tuple[Collective, ...]:
    counts = list(counts)
    return tuple(
        Collective(
            place.op,
            place.module,
            place.phase,
            max(count.collective_bytes[place] for count in counts),
            max(count.num_collectives[place] for count in counts),
        )
        for place in _places(count.num_collectives for count in counts)
    )


def _places(each: Iterable[Iterable[Place]]) -> list[Place]:
    return list(dict.fromkeys(itertools.chain.from_iterable(each)))


def _empty(counts: Iterable[Counts], names: list[str]) -> tuple[EmptyParts, ...]:
    first = next(iter(counts))
    return tuple(
        EmptyParts(place.op, place.module, place.phase, names[axis], dim, extent, num_empty)
        for (axis, dim), (place, extent, num_empty) in first.empty.items()
    )
