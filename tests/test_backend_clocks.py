"""Ranks of one host whose clocks tell different times: containers that were moved, in time namespaces of their own."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from forked import served_store

PROGRAM = """
import json, sys, torch, torchtp, torch.distributed as dist
rank, port = map(int, sys.argv[1:])
dist.init_process_group("torchtp", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)
tensor = torch.full((1000,), rank + 1.0)
for _ in range(3):
    dist.all_reduce(tensor)
    dist.barrier()
print(json.dumps([tensor[0].item(), max(map(max, torchtp.stats().groups[0].waited_s))]))
dist.destroy_process_group()
"""
HOUR = 3600
ELSEWHERE = ("unshare", "--time", "--fork", f"--boottime={HOUR}", f"--monotonic={HOUR}")


def _can_be_made():
    return (
        shutil.which(ELSEWHERE[0]) is not None
        and not subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_of_different_time_namespaces_meet(ahead):
    if not _can_be_made():
        pytest.skip("time namespaces cannot be made here")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with served_store() as (_, port):
        ranks = [
            subprocess.Popen(
                [*(ELSEWHERE if rank == ahead else ()), sys.executable, "-c", PROGRAM, str(rank), str(port)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [rank.communicate() for rank in ranks]
    for output, errors in told:
        assert output, errors
        total, waited = json.loads(output)
        assert total == 12.0, output
        assert 0 <= waited < HOUR / 2, output
