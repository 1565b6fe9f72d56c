"""Functions run on several ranks of this machine, and several hosts on one machine: for tests and benchmarks."""

from torchtp.testing.poison import poison_empty
from torchtp.testing.ranks import RanksFailed, run_ranks, start_rank, timeout_scale

__all__ = ["RanksFailed", "poison_empty", "run_ranks", "start_rank", "timeout_scale"]
