"""TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps every backend of a group, changes no result."""

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import copy, torch, torch.distributed as dist, torchtp
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("torchtp")
layout = torchtp.Layout(init_device_mesh("cpu", (2,), mesh_dim_names=("w",)), spatial={"w": -1})
torch.manual_seed(0)
single = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.MaxPool2d(2), torch.nn.Conv2d(4, 2, 5)
).double()
model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
image = torch.randn(2, 3, 13, 21, dtype=torch.float64)
for each in (model, single):
    each(image).square().sum().backward()
for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)
ranks = [None, None]
dist.all_gather_object(ranks, dist.get_rank())
assert ranks == [0, 1]
try:
    dist.all_reduce(torch.ones(5 + dist.get_rank()))
except RuntimeError as error:
    assert "mismatch" in str(error), error
else:
    raise AssertionError("a mismatch was not seen")
print("exact")
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11's wrapper has no allgather_into_tensor_coalesced"
)
def test_detail_wraps_the_backend_and_all_is_exact(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", program],
        env=os.environ
        | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exact") == 2
