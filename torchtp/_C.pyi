import datetime
from collections.abc import Sequence

import torch.distributed as dist

built_for_torch: str

def owned(extent: int, num_shards: int, shard: int) -> tuple[int, int]: ...
def exchanged_bytes(group_name: str) -> int: ...

class TorchtpBackend(dist.distributed_c10d.Backend):
    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        group_name: str,
        global_ranks: Sequence[int],
    ) -> None: ...
