"""Swaps a model's layers for the variants of this package, in place."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from torch import nn

from torchtp.layout import Layout, check_types
from torchtp.parallel import classes, equality

Module = TypeVar("Module", bound=nn.Module)


def convert(model: Module, layout: Layout) -> Module:
    """Have every layer of `model` that is exactly one of torch.nn be its variant of `torchtp.nn`; in place, returned.

    Parameters, buffers, hooks and names stay. So do layers of other classes, except those called LayerNorm2d that are
    LayerNorms over channels. Parameters and buffers are broadcast from the first rank of `layout.group`. Images are cut by
    `layout.shard`, and nobody compares their values: `torchtp.parallelize` does.

    Raises ValueError on all ranks where their parameters differ or are not on the layout's devices; TypeError for what
    is no module or no Layout.
    """
    check_types("convert", model, layout)
    equality.make_equal(model, layout)
    variants = _variants()
    for module in model.modules():
        variant = variants.get(type(module))
        if variant is None and type(module).__name__ == "LayerNorm2d" and isinstance(module, nn.LayerNorm):
            variant = variants[_LayerNorm2d]
        if variant is not None:
            classes.become(module, variant)
    return model


class _LayerNorm2d:
    """Stands for the classes of that name elsewhere."""


@cache
def _variants() -> dict[type, type]:
    from torchtp import nn as ours

    found = {getattr(nn, name): getattr(ours, name) for name in ours.__all__ if hasattr(nn, name)}
    return {_LayerNorm2d: ours.LayerNorm2d, **found}
