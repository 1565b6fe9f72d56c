"""The backend `torchtp` of torch.distributed: shared memory between the ranks of a host, TCP between hosts, an inner NCCL group for CUDA."""

from __future__ import annotations

import atexit
import copy
import datetime
import functools
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torchtp import _C, incarnations, trace

# For tests on machines without a card: "gloo" takes the place of NCCL as the inner backend, and has the tensors on the
# CPU once `_set_inner_device("cpu")` was called on all ranks.
_TEST_INNER = "TORCHTP_TEST_INNER"

# A rank that does not come is named by torchtp when the timeout has passed; NCCL, which would end the process, comes later.
_NCCL_PATIENCE = datetime.timedelta(seconds=10)

_fork_guard = _C.ForkGuard()
_open_groups = _C.OpenGroups()
_incarnation: str | None = None  # of this process, as the ranks of its default group have agreed

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=5)


def timeout_of(given: datetime.timedelta) -> datetime.timedelta:
    """The timeout of a group: what it was given, else TORCHTP_TIMEOUT, else that of the default group, else 5 minutes.

    torch.distributed passes 30 minutes to say that none was given. Raises ValueError if the timeout is not positive, or
    TORCHTP_TIMEOUT not a positive number of seconds, of 0.001 at least.
    """
    if given <= datetime.timedelta(0):
        raise ValueError(f"the timeout of a process group must be positive, not {given.total_seconds():g} s")
    if given != dist.constants.default_pg_timeout:
        return given
    text = os.environ.get("TORCHTP_TIMEOUT")
    if text is None:
        default_group = _default_group()
        return _DEFAULT_TIMEOUT if default_group is None else default_group.options._timeout
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds < 1e9:
        raise ValueError(f"TORCHTP_TIMEOUT must be a positive number of seconds, 0.001 at least, not {text!r}")
    return datetime.timedelta(seconds=seconds)


def _default_group() -> _C.TorchtpBackend | None:
    if not dist.is_initialized():
        return None
    world = dist.distributed_c10d._get_default_group()
    backends = (world._get_backend(device) for device in world._device_types)
    return next((backend for backend in backends if isinstance(backend, _C.TorchtpBackend)), None)


def create(options: Any, backend_options: Any = None) -> _C.TorchtpBackend:
    """Make the backend of one process group from c10d's `_DistributedBackendOptions`; collective.

    `backend_options` may be `ProcessGroupNCCL.Options`, for tensors on CUDA. Raises torch.distributed.DistBackendError
    if a rank does not come or cannot take part.
    """
    timeout = timeout_of(options.timeout)
    return _make(
        backend_options,
        _agreed_incarnation(options.store, options.group_rank, options.group_size, timeout),
        options.store,
        options.group_rank,
        options.group_size,
        timeout,
        options.group_id or "",
        list(options.global_ranks_in_group or []),
    )


def _agreed_incarnation(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """A prefix for what only the ranks of this life of the job see of the store; empty where there is one life.

    They agree while the default group is made; of later groups it knows who has died meanwhile, so they ask nobody.
    """
    global _incarnation
    if not incarnations.is_possible():
        return ""
    if _default_group() is not None and _incarnation is not None:
        return _incarnation
    incarnation = incarnations.agree(store, rank, size, timeout)
    if not dist.is_initialized():
        _incarnation = incarnation
    return incarnation


def _make(
    backend_options: Any,
    incarnation: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    name: str,
    global_ranks: Sequence[int],
) -> _C.TorchtpBackend:
    own_store = dist.PrefixStore(incarnation, store) if incarnation else store

    def inner(store_prefix: str) -> Any:
        inner_store = dist.PrefixStore(store_prefix, own_store)
        if os.environ.get(_TEST_INNER) == "gloo":
            return dist.ProcessGroupGloo(inner_store, rank, size, timeout)
        if not dist.is_nccl_available():
            raise RuntimeError("torchtp carries CUDA tensors by NCCL, and this PyTorch was built without it")
        given = isinstance(backend_options, dist.ProcessGroupNCCL.Options)
        options: Any = copy.deepcopy(backend_options) if given else dist.ProcessGroupNCCL.Options()
        options._timeout = timeout + _NCCL_PATIENCE
        options.global_ranks_in_group = list(global_ranks)
        options.group_name = name
        return dist.ProcessGroupNCCL(inner_store, rank, size, options)

    def make_group(store: dist.Store, *args: Any) -> _C.TorchtpBackend:
        # Global ranks come last; of a merged group, some of which may belong to another job, none are known.
        return _make(backend_options, incarnation if args[-1] else "", store, *args)

    if not 0 <= rank < size:
        raise ValueError(f"a group of {size} has the ranks 0 to {size - 1}, but this one is given rank {rank}")
    return _C.TorchtpBackend(
        own_store,
        rank,
        size,
        timeout,
        name,
        global_ranks,
        inner,
        make_group,
        trace.calls,
        _fork_guard,
        _open_groups,
        _default_group(),
    )


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: datetime.timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until every rank of `group` has come, as torch.distributed.monitored_barrier does for gloo alone.

    Raises torch.distributed.DistBackendError on the ranks that came if one has not within `timeout` (a timedelta or
    seconds; by default the group's). Rank 0 names the first that is missing, or all with `wait_all_ranks`. The group
    has ended then, and every later call on it raises too. On a rank outside of `group` it does nothing.
    Raises ValueError for a timeout that is not positive, or not finite.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if timeout is None:
        group.monitored_barrier(wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]
        return
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"monitored_barrier: timeout must be positive and finite, not {seconds:g} s: leave it out for the group's"
        )
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    group.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]


def register() -> None:
    """Make `init_process_group("torchtp")` known to torch.distributed; harmless when it is known already."""
    if dist.is_available():
        dist.Backend.register_backend("torchtp", create, extended_api=True, devices=["cpu", "cuda"])
        _look_after_process()


def _end_groups() -> None:
    _open_groups.end(getattr(sys, "last_value", None))  # that Python has told of, and ends by


@functools.cache
def _look_after_process() -> None:
    atexit.register(_end_groups)  # before Python begins to end
    os.register_at_fork(
        before=_fork_guard.before_fork,
        after_in_parent=_fork_guard.after_fork_in_parent,
        after_in_child=_fork_guard.after_fork_in_child,
    )
