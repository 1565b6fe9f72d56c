"""Ranks that MPI has started: where they stand, told as torchrun tells it."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

# Rank and size among all, and on the host: of Open MPI; of MPICH, Intel MPI and Slurm's PMI, which leaves the host out.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def tell_as_torchrun() -> bool:
    """Where MPI has started several ranks, set what torchrun sets, but for the hosts (see `tell_hosts`). Whether it has.

    Raises ValueError where they have not been told a place to meet at.
    """
    for names in _VARIABLES:
        rank, size, local_rank, local_size = (os.environ.get(name) for name in names)
        if rank is None or size is None or int(size) == 1:
            continue
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"hvd.init: MPI has started {size} ranks, which meet at MASTER_ADDR and MASTER_PORT, but this one has no "
                f"{' and no '.join(missing)}: use mpirun -x MASTER_ADDR=<the host of rank 0> -x MASTER_PORT=29500, or torchrun"
            )
        told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
        os.environ.update({name: value for name, value in told.items() if value is not None})
        return True
    return False


def tell_hosts() -> None:
    """The same for hosts, by what all ranks know of themselves. Collective: every rank calls it."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (os.environ.get("LOCAL_RANK"), socket.gethostname()))
    hosts = [host for _, host in told]
    local_ranks = [local or str(hosts[:rank].count(host)) for rank, (local, host) in enumerate(told)]
    own, host = local_ranks[dist.get_rank()], hosts[dist.get_rank()]
    os.environ["LOCAL_RANK"] = own
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(hosts.count(host)))
    os.environ["GROUP_RANK"] = str(local_ranks[: dist.get_rank()].count(own))
    os.environ["GROUP_WORLD_SIZE"] = str(local_ranks.count("0"))
