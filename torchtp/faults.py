"""Mistakes that one rank finds in what it was given: all ranks of a group raise, and none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def fault_of(check: Callable[[], Any]) -> TypeError | ValueError | None:
    """What a check raises, if it raises."""
    try:
        check()
    except (TypeError, ValueError) as error:
        return error
    return None


def agreed(
    fault: TypeError | ValueError | None, facts: Any = None, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """The facts of all ranks; collective. Where a rank has a fault all raise: it its own, the others the first one's."""
    mine = (facts, None if fault is None else (isinstance(fault, TypeError), str(fault)))
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    if fault is not None:
        raise fault
    for rank, (_, theirs) in enumerate(gathered):
        if theirs is not None:
            named = rank if group is None else dist.get_global_rank(group, rank)
            raise (TypeError if theirs[0] else ValueError)(f"on rank {named}: {theirs[1]}")
    return [of_rank for of_rank, _ in gathered]
