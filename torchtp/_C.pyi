import datetime
from collections.abc import Sequence

import torch
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

class Reducer:
    sync: bool
    def __init__(
        self,
        parameters: list[torch.Tensor],
        names: list[str],
        group_name: str,
        bucket_bytes: int,
        first_bucket_bytes: int,
        compression: str,
        average: bool,
    ) -> None: ...
    def prepare(self) -> None: ...
    def watch(self, output: torch.Tensor) -> None: ...
    def record(self, on: bool) -> None: ...
    def reset_statistics(self) -> None: ...
    def statistics(self) -> dict[str, float]: ...
    def events(self) -> list[tuple[str, int]]: ...
    def bucket_names(self) -> list[list[str]]: ...
    def holds_gradient(self, parameter: int) -> bool: ...
