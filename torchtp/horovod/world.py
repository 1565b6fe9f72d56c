"""Who takes part: `init`, ranks, sizes, hosts, and what this PyTorch was built with."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from torchtp.horovod.common import check_started
from torchtp.horovod.launched import tell_as_torchrun, tell_hosts


def init(backend: str = "torchtp") -> None:
    """Join the ranks that torchrun or MPI started, alone without; does nothing where a process group exists.

    MPI's are told where to meet by MASTER_ADDR and MASTER_PORT: ValueError without.
    """
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    elif tell_as_torchrun():
        dist.init_process_group(backend)
        tell_hosts()
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())


def shutdown() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Whether this process has joined the others."""
    return dist.is_initialized()


def size() -> int:
    """The number of ranks; ValueError before `init`."""
    check_started("size")
    return dist.get_world_size()


def rank() -> int:
    """This process's rank; ValueError before `init`."""
    check_started("rank")
    return dist.get_rank()


def local_rank() -> int:
    """The rank among those of this host, as torchrun numbers them."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """The number of ranks of this host, as torchrun tells it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cross_rank() -> int:
    """The number of this host, as torchrun numbers them."""
    return int(os.environ.get("GROUP_RANK", "0"))


def cross_size() -> int:
    """The number of hosts, as torchrun tells it."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def is_homogeneous() -> bool:
    """Whether every host has as many ranks as this one; with several hosts collective: every rank calls it."""
    check_started("is_homogeneous")
    if cross_size() == 1:
        return True
    sizes: list[int] = [0] * size()
    dist.all_gather_object(sizes, local_size())
    return len(set(sizes)) == 1


def barrier() -> None:
    """Wait until every rank has come; ValueError before `init`."""
    check_started("barrier")
    dist.barrier()


def mpi_built() -> bool:
    """False: ranks are started by torchrun and meet over TCP."""
    return False


def mpi_enabled() -> bool:
    """False, see `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """False, see `mpi_built`."""
    return False


def gloo_built() -> bool:
    """Whether this PyTorch has gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether the ranks have joined by `init("gloo")`."""
    return dist.is_initialized() and "gloo" in dist.get_backend()


def nccl_built() -> bool:
    """Whether this PyTorch has NCCL, which tensors on CUDA travel by."""
    return dist.is_nccl_available()


def cuda_built() -> bool:
    """Whether this PyTorch is for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch is for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """False: there is no DDL in PyTorch."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL in PyTorch."""
    return False
