"""What a forward writes into its arguments reaches the caller: losses it appends, a cache it fills, an image it normalizes in place."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchtp.dtensor import notice
from torchtp.dtensor.parts import Watch
from torchtp.dtensor.whole import Gather

Give = Callable[[Any], Any]


class Arguments:
    """The arguments of a call, each tensor replaced by what `cut` makes of it, and what is to go back afterwards."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Give):
        self._cut: dict[int, tuple[torch.Tensor, Any, Watch | int]] = {}  # by id of the caller's tensor

        def once(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in self._cut:
                made = cut(leaf)
                if made is leaf or isinstance(leaf, DTensor):
                    return made
                self._cut[id(leaf)] = leaf, made, Watch(made) if isinstance(made, DTensor) else made._version
            return self._cut[id(leaf)][1]

        self.args, self.kwargs = pytree.tree_map(once, (args, kwargs))
        pairs = zip(_containers((args, kwargs)), _containers((self.args, self.kwargs)), strict=True)
        self._containers = [_Container(*pair) for pair in pairs]

    def settle(self, outputs: Any, give: Give) -> tuple[Any, Any]:
        """`give` of the outputs and of what was put into containers, which goes into the caller's; writes go into his tensors."""
        changed = [container for container in self._containers if container.has_changed()]
        outputs = give(next((one.original for one in self._containers if one.copy is outputs), outputs))
        contents = give([container.new for container in changed])
        for container, new in zip(changed, contents, strict=True):
            container.put_back(new)
        for leaf, made, before in self._cut.values():
            if isinstance(before, Watch):
                if before.was_written():
                    notice.gathering(
                        "forward", leaf.shape, leaf.dtype, "changes an image in place, which its caller holds whole"
                    )
                    leaf.copy_(Gather.apply(made))
            elif made._version != before:
                leaf.copy_(made)
        return outputs, contents


class _Container:
    """A list or dict of the caller's and its copy that forward got."""

    def __init__(self, original: Any, copy: Any):
        self.original, self.copy = original, copy
        self._before = _items(copy)
        self._given = {
            id(value): theirs for value, theirs in zip(self._before.values(), _items(original).values(), strict=True)
        }
        self.new: dict[Any, Any] = {}

    def has_changed(self) -> bool:
        """Whether forward put other values into the copy, or took some out; `new` has those that the caller did not give."""
        now = _items(self.copy)
        if list(now) == list(self._before) and all(value is self._before[key] for key, value in now.items()):
            return False
        self.new = {key: value for key, value in now.items() if id(value) not in self._given}
        return True

    def put_back(self, new: dict[Any, Any]) -> None:
        content = {key: new[key] if key in new else self._given[id(value)] for key, value in _items(self.copy).items()}
        self.original.clear()
        if isinstance(self.original, dict):
            self.original.update(content)
        else:
            self.original.extend(content.values())


def _containers(nested: Any) -> list[Any]:
    """Lists and dicts in it, outer ones first."""
    found: list[Any] = []

    def look(node: Any) -> bool:
        if isinstance(node, (list, dict, collections.deque)):
            found.append(node)
        return False

    pytree.tree_leaves(nested, is_leaf=look)
    return found


def _items(container: Any) -> dict[Any, Any]:
    return dict(container.items() if isinstance(container, dict) else enumerate(container))
