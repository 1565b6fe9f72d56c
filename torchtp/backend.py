"""The backend `torchtp` of torch.distributed: collectives between the ranks of one host through shared memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torchtp import _C


def create(options: Any, backend_options: Any = None) -> _C.TorchtpBackend:
    """Make the backend of one process group from c10d's `_DistributedBackendOptions`; collective.

    Raises torch.distributed.DistBackendError on every rank if they are not all on one host or one does not come.
    """
    return _C.TorchtpBackend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id or "",
        list(options.global_ranks_in_group or []),
    )


def register() -> None:
    """Make `init_process_group("torchtp")` known to torch.distributed; harmless when it is known already."""
    if dist.is_available():
        dist.Backend.register_backend("torchtp", create, extended_api=True, devices=["cpu", "cuda"])
