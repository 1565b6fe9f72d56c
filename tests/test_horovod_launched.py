"""Horovod's `init` of ranks that MPI has started."""

import os

import pytest
import torch

import torchtp.horovod as hvd
from torchtp.horovod import launched
from torchtp.testing import run_ranks

OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
HYDRA = {
    "RANK": "PMI_RANK",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}


def _as_if_started(names, num_hosts):
    """As on hosts with the same number of ranks each, one host after the other."""
    told = {name: os.environ.pop(name) for name in names}
    told["LOCAL_WORLD_SIZE"] = str(int(told["WORLD_SIZE"]) // num_hosts)
    told["LOCAL_RANK"] = str(int(told["RANK"]) % int(told["LOCAL_WORLD_SIZE"]))
    os.environ.update({name: told[key] for key, name in names.items()})


def _stand(names, num_hosts):
    _as_if_started(names, num_hosts)
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    return (
        total,
        hvd.rank(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        hvd.is_homogeneous(),
    )


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA])
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_ranks_that_mpi_started_meet(names, num_hosts):
    size = 4
    local = size // num_hosts
    expected = [(size, rank, rank % local, local, rank // local, num_hosts, True) for rank in range(size)]
    assert run_ranks(_stand, size, names, num_hosts, backend=None, fresh=True) == expected


def _stand_by_ranks_alone(num_hosts):
    """As Slurm's PMI starts ranks."""
    told = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    os.environ.update(PMI_RANK=told["RANK"], PMI_SIZE=told["WORLD_SIZE"])
    host = int(told["RANK"]) * num_hosts // int(told["WORLD_SIZE"])
    launched.socket.gethostname = lambda: f"node{host}"
    hvd.init()
    return hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_ranks_that_are_not_told_their_place_on_the_host_find_it(num_hosts):
    size = 4
    local = size // num_hosts
    expected = [(rank, rank % local, local, rank // local, num_hosts, True) for rank in range(size)]
    assert run_ranks(_stand_by_ranks_alone, size, num_hosts, backend=None, fresh=True) == expected


def _have_no_place_to_meet():
    _as_if_started(OPEN_MPI, 1)
    del os.environ["MASTER_PORT"]
    with pytest.raises(
        ValueError, match=r"^hvd.init: MPI has started 2 ranks.*no MASTER_PORT: use mpirun -x MASTER_ADDR"
    ):
        hvd.init()
    assert not hvd.is_initialized()


def test_ranks_that_mpi_started_are_told_where_to_meet():
    run_ranks(_have_no_place_to_meet, 2, backend=None, fresh=True)
