"""The lives of a job: torchrun serves one store to the ranks that it starts and, after a failure, to those that it starts in their place.

What ranks of an earlier life have said there stays, of some more than of others, as the failure came. So the ranks of one life find
out which it is.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid

import torch.distributed as dist

_FIRST_PAUSE, _LAST_PAUSE = 1e-4, 1e-2  # seconds between two looks at the store


def is_possible() -> bool:
    """Whether torchrun started this process, and may start others in its place."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def agree(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """A prefix of the store's keys for those who call this now; collective.

    Rank 0 opens a meeting of its own, the others say a word in the last that was opened. It is theirs if rank 0 repeats
    that word, which it has heard since: a meeting of an earlier life stays silent, or repeats other words.
    Raises torch.distributed.DistBackendError if a rank does not come.
    """
    meetings = f"torchtp/incarnations/{size}"
    word = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    number = store.add(meetings, int(rank == 0))
    store.set(f"{meetings}/{number}/{rank}", word)
    awaited, pause = 0, _FIRST_PAUSE
    while True:
        everybody = f"{meetings}/{number}/all"
        if rank == 0:
            while awaited < size and store.check([f"{meetings}/{number}/{awaited}"]):
                awaited += 1
            if awaited == size:
                store.set(everybody, b" ".join(store.get(f"{meetings}/{number}/{r}") for r in range(size)).decode())
        if store.check([everybody]) and word in store.get(everybody).decode().split():
            return f"torchtp/incarnation/{number}"
        if time.monotonic() > deadline:
            came = [store.check([f"{meetings}/{number}/{r}"]) for r in range(size)]
            raise dist.DistBackendError(
                f"torchtp: rank {came.index(False) if False in came else 0} did not come to the creation of the process group "
                f"within {timeout.total_seconds():g} s; rank {rank} waited for it"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
        if rank != 0 and (last := store.add(meetings, 0)) != number:
            number = last
            store.set(f"{meetings}/{number}/{rank}", word)
