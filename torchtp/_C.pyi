import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

built_for_torch: str

def owned(extent: int, num_shards: int, shard: int) -> tuple[int, int]: ...
def output_extent(
    extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool = False
) -> int: ...
def transposed_extent(
    extent: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int
) -> int: ...
def read_by(outputs: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]: ...
def readers_of(inputs: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]: ...
def pull_plan(extent: int, rank: int, wanted: Sequence[tuple[int, int]]) -> dict[str, Any]: ...
def traffic(group_name: str) -> dict[str, int]: ...
def set_exchange(group_name: str, kind: str) -> None: ...
def pull_halos(
    stacked: Sequence[torch.Tensor],
    stacked_dim: int,
    dim: int,
    extent: int,
    begins: Sequence[int],
    ends: Sequence[int],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]: ...

class BytesExchange:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def start(self, sends: Sequence[tuple[int, int, bytes]], receives: Sequence[tuple[int, int]]) -> int: ...
    def finish(self, ticket: int) -> list[tuple[int, bytes, int]]: ...

def exchange_of(group_name: str, device: str = "cpu") -> BytesExchange: ...
def device_exchanges(group_name: str) -> list[dict[str, Any]]: ...
def check_exchanges(group_name: str) -> None: ...
def choose_device_exchange(ranks: Sequence[dict[str, Any]]) -> tuple[str, str]: ...
def thread_exchanges(size: int, timeout_seconds: float) -> list[BytesExchange]: ...

class Trace:
    def __init__(self) -> None: ...
    @property
    def path(self) -> bytes: ...
    def write_to(self, path: bytes, signals: Sequence[int]) -> None: ...
    def dump(self, reason: str, path: bytes = b"") -> bytes: ...
    def statistics(self) -> list[dict[str, Any]]: ...
    def reset_statistics(self) -> None: ...

class ForkGuard:
    def __init__(self) -> None: ...
    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...

class OpenGroups:
    def __init__(self) -> None: ...
    def end(self, exception: BaseException | None = None) -> None: ...

class TorchtpBackend(Backend):
    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        group_name: str,
        global_ranks: Sequence[int],
        make_device_group: Callable[[str], Backend],
        make_group: Callable[[dist.Store, int, int, datetime.timedelta, str, Sequence[int]], TorchtpBackend],
        trace: Trace | None = None,
        fork_guard: ForkGuard | None = None,
        open_groups: OpenGroups | None = None,
        default_group: TorchtpBackend | None = None,
    ) -> None: ...
    @property
    def hosts(self) -> list[list[int]]: ...
    def _set_inner_device(self, type: str) -> None: ...

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
        packing: str,
        own_hook: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None: ...
    @staticmethod
    def check(
        parameters: list[torch.Tensor],
        names: list[str],
        bucket_bytes: int,
        first_bucket_bytes: int,
        compression: str,
        average: bool,
        packing: str,
    ) -> None: ...
    @property
    def num_unreduced(self) -> int: ...
    @property
    def num_passes(self) -> int: ...
    def set_interval(self, num_backwards: int) -> None: ...
    def reduce(self) -> None: ...
    def clip_norm(self, most: float) -> torch.Tensor | None: ...
    def prepare(self) -> None: ...
    def watch(self, output: torch.Tensor) -> None: ...
    def record(self, on: bool) -> None: ...
    def reset_statistics(self) -> None: ...
    def statistics(self) -> dict[str, float]: ...
    def events(self) -> list[tuple[str, int]]: ...
    def bucket_names(self) -> list[list[str]]: ...
    def holds_gradient(self, parameter: int) -> bool: ...

class CapturedGradients:
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        group_name: str,
        own_hook: Callable[[torch.Tensor], torch.Tensor] | None,
        is_cut_backward: Callable[[], bool],
    ) -> None: ...
    def begin(self) -> None: ...

def is_hooked(tensor: torch.Tensor, most_nodes: int) -> bool: ...

class kernels:
    """Kernels by themselves; halos are above, below, left and right of `own`, or none at all."""

    Halos = Sequence[torch.Tensor | None]

    @staticmethod
    def depthwise(
        own: torch.Tensor,
        halos: Halos,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        offset: tuple[int, int],
        stride: int = 1,
        dilation: int = 1,
        part: str = "all",
    ) -> None: ...
    @staticmethod
    def depthwise_layer_norm(
        own: torch.Tensor,
        halos: Halos,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
        offset: tuple[int, int],
        part: str = "all",
    ) -> None: ...
    @staticmethod
    def depthwise_input_grad(
        own: torch.Tensor,
        halos: Halos,
        weight: torch.Tensor,
        out: torch.Tensor,
        offset: tuple[int, int],
        stride: int = 1,
        dilation: int = 1,
        part: str = "all",
    ) -> None: ...
    @staticmethod
    def depthwise_weight_grad(
        x: torch.Tensor,
        dy: torch.Tensor,
        dy_halos: Halos,
        out: torch.Tensor,
        offset: tuple[int, int],
        stride: int = 1,
        dilation: int = 1,
    ) -> None: ...
    @staticmethod
    def halo_pack(
        tensor: torch.Tensor, packed: torch.Tensor, dim: int, starts: tuple[int, int], depths: tuple[int, int]
    ) -> None: ...
    @staticmethod
    def halo_unpack(
        packed: torch.Tensor, tensor: torch.Tensor, dim: int, starts: tuple[int, int], depths: tuple[int, int]
    ) -> None: ...
    @staticmethod
    def bucket_pack(tensors: Sequence[torch.Tensor], flat: torch.Tensor, scale: float = 1.0) -> None: ...
    @staticmethod
    def bucket_unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None: ...
    @staticmethod
    def bucket_clip(flat: torch.Tensor, most: float) -> torch.Tensor: ...
