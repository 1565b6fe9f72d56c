"""What stands between ops and kernels, executed without a GPU.

The ops are built once more for a device whose memory is the CPU's and whose launches run the kernels' programs there, one
block after the other (tests/device); on it the tests of ops on a GPU run as there. New tensors of it hold NaN.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TORCH = Path(torch.__file__).parent
FILES = ["tests/test_cuda.py", "tests/test_cuda_gradients.py"]


pytestmark = pytest.mark.long  # two minutes of compiling on one core


@pytest.fixture(scope="module")
def library() -> Path:
    place = ROOT / "build" / "device" / f"torch{torch.__version__}"
    # As torch was built; 2.13's headers need C++20.
    standard = 20 if torch.__version__.split(".")[:2] >= ["2", "12"] else 17
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
    command = ["make", "-s", "-j", jobs, "-f", "tests/device/Makefile", f"BUILD={place}", f"TORCH={TORCH}"]
    done = subprocess.run([*command, f"STANDARD={standard}"], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return place / "device.so"


@pytest.mark.timeout(1800)
def test_ops_reach_their_kernels_rightly(library):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120", *FILES]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TORCHTP_TEST_DEVICE": str(library)}, capture_output=True, text=True, timeout=1700
    )  # fmt: skip
    # Not the exit status: a process that leaves with the device's threads running may crash behind its last line.
    summary = re.search(r"^(\d+) passed, 4 skipped", done.stdout, re.M)  # these say why
    assert summary and int(summary[1]) > 100, done.stdout[-6000:] + done.stderr[-2000:]


PROGRAM = """
import os, sys
sys.path.insert(0, "tests")
import pretended, torch, torchtp
count = pretended.load(sys.argv[1]).torchtp_num_launches
ops, cut = torch.ops.torchtp, ([], [], [])

def device(*sizes):
    return torch.randn(sizes).to(pretended.DEVICE).requires_grad_()

def launches(run):
    before = count()
    out = run()
    forward = count() - before
    out.backward(torch.ones(out.shape).to(pretended.DEVICE))
    return forward, count() - before - forward

x, w, b, g = device(2, 4, 9, 8), device(4, 1, 7, 7), device(4), device(4)
print(launches(lambda: ops.convolution(x, w, b, [1, 1], [3, 3], [1, 1], False, [0, 0], 4, *cut)))
print(launches(lambda: ops.convolution(x, w, b, [2, 2], [3, 3], [1, 1], False, [0, 0], 4, *cut)))
print(launches(lambda: ops.convolution(x, w, b, [1, 1], [6, 6], [2, 2], False, [0, 0], 4, *cut)))
print(launches(lambda: ops.convolution(x, w[..., :4, :], b, [2, 3], [6, 6], [1, 2], False, [0, 0], 4, *cut)))
print(launches(lambda: ops.layer_norm_channels_first(x, g, b, 1e-5)[0]))
last = torch.randn(2, 4, 9, 8).contiguous(memory_format=torch.channels_last).to(pretended.DEVICE).requires_grad_()
for image in (last, x):
    print(launches(lambda: ops.depthwise_layer_norm(image, w, b, g, b, 1e-5, False, [1, 1], [3, 3], [1, 1], *cut)[0]))
print(launches(lambda: ops.batch_norm(x, g, b, None, None, True, 0.1, 1e-5, [])[0]))
print(launches(lambda: ops.group_norm(x, g, b, 2, 1e-5, [])[0]))
print(launches(lambda: ops.interpolate(x, "linear", [5, 12], [0.0, 0.0], False, *cut)))
print(launches(lambda: ops.max_pool(x, [3, 3], [2, 2], [1, 1], [1, 1], False, *cut)[0]))
print(launches(lambda: ops.layer_scale(x, x, g, None)), flush=True)
os._exit(0)
"""


def test_each_op_takes_as_many_launches_as_it_says(library):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [tuple(map(int, line.strip("()").split(","))) for line in done.stdout.splitlines()]
    # Depthwise, any window: one; dx, dw in two. Layer norm: one; dx, and the sums. Both of them, one behind the other.
    # Norms: moments, finish, apply; dots, finish, combine. Max pooling: ATen's (and one more where it is cut); one. Layer scale: one; both
    # gradients, and gamma's sums.
    assert found == [(1, 3), (1, 3), (1, 3), (1, 3), (1, 2), (2, 5), (2, 5), (3, 3), (3, 3), (1, 1), (0, 1), (1, 2)]


TWICE = """
import os, sys
sys.path.insert(0, "tests")
import pretended, torch, torchtp
import torch.nn.functional as F
pretended.load(sys.argv[1])
ops, group = torch.ops.torchtp, ["twice"]

def pairs(*sizes):
    here = torch.randn(sizes)
    return here.to(pretended.DEVICE).requires_grad_(), here.clone().requires_grad_()

def compare(found, expected, rows, inputs):
    grad = torch.randn(found.shape)
    found.backward(grad.to(pretended.DEVICE))
    expected.backward(torch.cat([grad, grad], rows))
    torch.testing.assert_close(found.cpu(), expected.narrow(rows, 0, found.size(rows)), rtol=1e-4, atol=1e-4)
    for device, cpu in inputs:  # every gradient of both halves is in the whole's
        torch.testing.assert_close(2 * device.grad.cpu(), cpu.grad, rtol=1e-4, atol=1e-4)

x, w, b = pairs(2, 6, 5, 4), pairs(6), pairs(6)
mean, var = torch.randn(6), torch.rand(6)
running = [mean.to(pretended.DEVICE), var.to(pretended.DEVICE)]
found = ops.batch_norm(x[0], w[0], b[0], *running, True, 0.3, 1e-5, group)[0]
compare(found, F.batch_norm(torch.cat([x[1], x[1]]), mean, var, w[1], b[1], True, 0.3), 0, [x, w, b])
for now, expected in zip(running, [mean, var]):
    torch.testing.assert_close(now.cpu(), expected)
x, w, b = pairs(2, 6, 5, 4), pairs(6), pairs(6)
found = ops.group_norm(x[0], w[0], b[0], 3, 1e-5, group)[0]
compare(found, F.group_norm(torch.cat([x[1], x[1]], 2), 3, w[1], b[1]), 2, [x, w, b])

# In evaluation there is nothing to exchange.
x, w, b = pairs(2, 6, 5, 4), pairs(6), pairs(6)
out = ops.batch_norm(x[0], w[0], b[0], *running, False, 0.3, 1e-5, group)[0]
expected = F.batch_norm(x[1], mean, var, w[1], b[1], False)
for result in (out, expected):
    (result ** 2).sum().backward()
for device, cpu in [(out, expected), *((one[0].grad, one[1].grad) for one in (x, w, b))]:
    torch.testing.assert_close(device.cpu(), cpu, rtol=1e-4, atol=1e-4)
print("right", flush=True)
os._exit(0)
"""


def test_norms_merge_the_statistics_of_ranks(library):
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(library)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "right\n", done.stderr[-3000:]
