"""What stands on torch.distributed gives the same on the backend torchtp as on gloo: DDP, FSDP2, DTensor."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchtp.testing import run_ranks

BACKENDS = ("gloo", "torchtp")


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 5)
    ).double()


def _full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()
    return [_full(parameter) for parameter in model.parameters()]


def _ddp(find_unused):
    model = torch.nn.parallel.DistributedDataParallel(
        _model(), bucket_cap_mb=0.001, find_unused_parameters=find_unused, gradient_as_bucket_view=find_unused
    )
    return _train(model)


def _fsdp(from_process_group):
    model = fully_shard(_model())
    if from_process_group and hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    return _train(model)


def _redistributed(_):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(size * 5 * 3, dtype=torch.float64).view(size * 5, 3)[: size * 5 - 1]
    results = []
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(full, mesh, [placement])
        for target in (Shard(0), Shard(1), Replicate()):
            results.append(_full(tensor.redistribute(mesh, [target])))
    partial = DTensor.from_local(full * (dist.get_rank() + 1), mesh, [Partial()])
    results += [_full(partial.redistribute(mesh, [target])) for target in (Shard(0), Shard(1), Replicate())]
    return results


@pytest.mark.parametrize(
    ("user", "flag"), [(_ddp, False), (_ddp, True), (_fsdp, False), (_fsdp, True), (_redistributed, None)]
)
@pytest.mark.parametrize("size", [2, 3])
def test_results_are_those_of_gloo(user, flag, size):
    gloo, own = (run_ranks(user, size, flag, backend=backend) for backend in BACKENDS)
    for ours, theirs in zip(own, gloo, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for ours in own[1:]:  # every rank has the same bits
        assert all(map(torch.equal, ours, own[0]))
