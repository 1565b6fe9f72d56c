import datetime
from collections.abc import Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

built_for_torch: str

def owned(extent: int, num_shards: int, shard: int) -> tuple[int, int]: ...
def exchanged_bytes(group_name: str) -> int: ...
def set_exchange(group_name: str, kind: str) -> None: ...

class TorchtpBackend(Backend):
    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        group_name: str,
        global_ranks: Sequence[int],
    ) -> None: ...
