"""Classes made from other classes, found again for as long as they are in use."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

Make = TypeVar("Make", bound=Callable[..., type])


def remembered(make: Make) -> Make:
    """`functools.cache` that forgets a class with the last module of it: one that a function defines may hold much."""
    known: weakref.WeakValueDictionary[tuple[Any, ...], type] = weakref.WeakValueDictionary()

    @functools.wraps(make)
    def found(*key: Any) -> type:
        made = known.get(key)
        return known.setdefault(key, make(*key)) if made is None else made

    return cast(Make, found)
