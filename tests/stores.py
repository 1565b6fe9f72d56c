"""Stores that tell of what the ranks of a group ask them, so that a test can break them, or a rank, at any word."""

from __future__ import annotations

import torch.distributed as dist


class Store(dist.Store):
    """Hands everything on to another store, after telling `before` of it."""

    def __init__(self, inner, before):
        super().__init__()
        self.inner, self.before = inner, before

    def set(self, key, value):
        self.before("set")
        self.inner.set(key, value)

    def get(self, key):
        self.before("get")
        return self.inner.get(key)

    def add(self, key, value):
        self.before("add")
        return self.inner.add(key, value)

    def check(self, keys):
        self.before("check")
        return self.inner.check(keys)

    def wait(self, keys, *timeout):
        self.before("wait")
        self.inner.wait(keys, *timeout)


def at_call(number, kind, then):
    """Does `then` before the number-th call of that kind, counted from 1."""
    seen = 0

    def before(called):
        nonlocal seen
        seen += called == kind
        if called == kind and seen == number:
            then()

    return before
