"""What each of several ranks on one card does in the cases of `ranks`; every function runs on all of them."""

from __future__ import annotations

import copy
import datetime
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchtp
from torchtp import _C

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def start(dry: bool) -> torch.device:
    """The device all ranks share. NCCL takes two ranks on a card for two of different hosts."""
    if dry:
        return torch.device("cpu")
    os.environ["NCCL_HOSTID"] = f"rank-{dist.get_rank()}"
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", 0)


def _same(found: Tensor, expected: Tensor, bound: float, what: str) -> float:
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.numel():
        return 0.0
    error = (found.double() - expected.double()).abs().max().item() / max(expected.abs().max().item(), 1e-3)
    if not error <= bound:
        raise AssertionError(f"{what}: relative error {error:.2e}, more than {bound:.0e}")
    return error


def plain_nccl(dry: bool) -> dict[str, Any]:
    """Without torchtp: whether NCCL takes several ranks on this card at all."""
    device = start(dry)
    group = dist.new_group(backend="gloo" if dry else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1 << 10,), rank + 1.0, device=device)
    dist.all_reduce(x, group=group)
    _same(x, torch.full_like(x, size * (size + 1) / 2), 0, "allreduce")
    mine, theirs = torch.full((100,), float(rank), device=device), torch.empty(100, device=device)
    calls = [
        dist.P2POp(dist.isend, mine, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, theirs, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    _same(theirs, torch.full_like(theirs, float((rank - 1) % size)), 0, "send and receive")
    return {}


def symmetric_memory(dry: bool) -> dict[str, Any]:
    """Without torchtp: whether ranks on one card see each other's memory."""
    device = start(dry)
    if dry:
        return {"skipped": "needs a card"}
    import torch.distributed._symmetric_memory as symmetric

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = symmetric.empty(1 << 10, device=device, dtype=torch.float32)
    group = dist.new_group(backend="gloo")
    handle = symmetric.rendezvous(mine, group.group_name)
    mine.fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier(group)
    peer = (rank + 1) % size
    found = handle.get_buffer(peer, (1 << 10,), torch.float32).clone()
    dist.barrier(group)
    _same(found, torch.full_like(found, peer + 1.0), 0, "the peer's memory")
    return {}


def collectives(dry: bool) -> dict[str, Any]:
    """The backend on device tensors, and on those of the CPU in the same group."""
    own, rank, size = start(dry), dist.get_rank(), dist.get_world_size()
    for device in {own, torch.device("cpu")}:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            parts = [torch.arange(size * 6, device=device).to(dtype) % 7 + 3 * r for r in range(size)]
            total = torch.stack(parts).sum(0).to(dtype)
            x = parts[rank].clone()
            dist.all_reduce(x)
            _same(x, total, 1e-2, f"allreduce {dtype} {device}")
            x = parts[rank].clone()
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            _same(x, torch.stack(parts).amax(0), 0, f"largest {dtype} {device}")
            gathered = torch.empty(size * parts[0].numel(), dtype=dtype, device=device)
            dist.all_gather_into_tensor(gathered, parts[rank])
            _same(gathered, torch.cat(parts), 0, f"allgather {dtype} {device}")
            share = torch.empty(6, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(share, parts[rank])
            _same(share, total[rank * 6 : rank * 6 + 6], 1e-2, f"reduce-scatter {dtype} {device}")
            x = parts[rank].clone()
            dist.broadcast(x, size - 1)
            _same(x, parts[-1], 0, f"broadcast {dtype} {device}")
        work = dist.all_reduce(parts[rank].float(), async_op=True)
        work.wait()
        dist.barrier()
    return {"devices": sorted({str(own), "cpu"})}


def pulls(dry: bool, exchange: str, draws: int) -> dict[str, Any]:
    """Any intervals of any cut tensor arrive bit for bit, and `push_add` is the adjoint."""
    device, rank, size = start(dry), dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    try:
        _C.set_exchange(group.group_name, exchange)
    except ValueError as error:
        return {"skipped": str(error)}
    for draw in range(draws):
        rng = random.Random(draw)
        extent, dim = rng.randint(1, 23), rng.choice([2, 3])
        sizes = [rng.randint(1, 3), rng.choice([1, 8, 33]), rng.randint(1, 9), rng.randint(1, 9)]
        sizes[dim] = extent
        layout = rng.choice([torch.contiguous_format, torch.channels_last])
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64])
        full = torch.randn(sizes, generator=torch.Generator().manual_seed(draw)).to(device, dtype)
        begins = [rng.randint(-4, extent + 2) for _ in range(size)]
        ends = [begin + rng.choice([0, rng.randint(1, extent + 4)]) for begin in begins]
        first, last = _C.owned(extent, size, rank)
        mine = full.narrow(dim, first, last - first).contiguous(memory_format=layout).requires_grad_()
        found = torch.ops.torchtp.pull(mine, dim, extent, begins, ends, group.group_name)
        expected = _rows(full, dim, begins[rank], ends[rank])
        _same(found.detach(), expected, 0, f"pull {draw}")
        cotangents = [_cotangent(full, dim, begins[r], ends[r], r) for r in range(size)]
        (grad,) = torch.autograd.grad(found, mine, cotangents[rank])
        whole = torch.zeros(sizes, dtype=torch.float64, device=device)
        for r in range(size):
            low, high = max(0, begins[r]), min(extent, ends[r])
            if low < high:
                whole.narrow(dim, low, high - low).add_(cotangents[r].narrow(dim, low - begins[r], high - low).double())
        bound = 1e-12 if dtype == torch.float64 else 3e-2 if dtype == torch.bfloat16 else 1e-6
        _same(grad, whole.narrow(dim, first, last - first), bound, f"push_add {draw}")
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return {"draws": draws}


def _rows(full: Tensor, dim: int, begin: int, end: int) -> Tensor:
    sizes = list(full.shape)
    sizes[dim] = end - begin
    out = full.new_zeros(sizes)
    low, high = max(0, begin), min(full.shape[dim], end)
    if low < high:
        out.narrow(dim, low - begin, high - low).copy_(full.narrow(dim, low, high - low))
    return out


def _cotangent(full: Tensor, dim: int, begin: int, end: int, rank: int) -> Tensor:
    sizes = list(full.shape)
    sizes[dim] = end - begin
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1000 + rank)).to(full.device, full.dtype)


class _ResNet(nn.Module):
    """The stem and two bottlenecks, the second with a stride of 2."""

    def __init__(self, num_channels: int):
        super().__init__()
        wide, c = 2 * num_channels, num_channels

        def unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
            return [convolution, nn.BatchNorm2d(outputs)]

        self.stem = nn.Sequential(*unit(c, c, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.first = nn.Sequential(*unit(c, c, 1), nn.ReLU(), *unit(c, c, 3), nn.ReLU(), *unit(c, c, 1))
        self.second = nn.Sequential(*unit(c, c, 1), nn.ReLU(), *unit(c, c, 3, 2), nn.ReLU(), *unit(c, wide, 1))
        self.shortcut = nn.Sequential(*unit(c, wide, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.first(x))
        return torch.relu(self.shortcut(x) + self.second(x))


def make_network(name: str) -> nn.Module:
    from fused import FusedBlock
    from networks import Block

    makers: dict[str, Callable[[], nn.Module]] = {
        "ConvNeXt block": lambda: Block(32, 0.0),
        "ConvNeXt block of torchtp's layers": lambda: FusedBlock(32, 0.0),
        "ResNet": lambda: _ResNet(16),
    }
    torch.manual_seed(3)
    network = makers[name]()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


def _layout(device: torch.device, axes: Sequence[str]) -> torchtp.Layout:
    size = dist.get_world_size()
    shape = (size,) if len(axes) == 1 else (2, size // 2)
    mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(axes))
    dims = {"h": -2, "w": -1}
    return torchtp.Layout(mesh, spatial={axis: dims[axis] for axis in axes})


def network(dry: bool, name: str, axes: Sequence[str], kind: str) -> dict[str, Any]:
    """A cut network equals the plain one on the same device: output and all gradients."""
    device = start(dry)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[kind]
    bound = 1e-9 if kind == "fp64" else 1e-4
    plain = make_network(name).to(device, dtype)
    layout = _layout(device, axes)
    cut = torchtp.parallelize(copy.deepcopy(plain), layout)
    channels = 16 if name == "ResNet" else 32
    generator = torch.Generator().manual_seed(4)
    image = torch.randn(2, channels, 43, 54, generator=generator).to(device, dtype)
    ours, theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
    expected = plain(theirs)
    weight = torch.randn(expected.shape, generator=generator).to(device, dtype)
    (expected * weight).sum().backward()
    found = cut(ours).full_tensor()
    (found * weight).sum().backward()
    errors = {"output": _same(found.detach(), expected.detach(), bound, "output")}
    for (label, mine), other in zip(cut.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None, label
        errors[label] = _same(mine.grad, other.grad, bound, f"gradient of {label}")
    tile = layout.tile(image.shape)
    assert ours.grad is not None and theirs.grad is not None
    errors["input"] = _same(ours.grad[tile], theirs.grad[tile], bound, "gradient of the input")
    return {"largest_error": max(errors.values()), "of": max(errors, key=lambda key: errors[key])}


def border(dry: bool, axes: Sequence[str]) -> dict[str, Any]:
    """A dense convolution whose border is computed apart, forward and backward, equals that of the whole image."""
    device = start(dry)
    layout = _layout(device, axes)
    dims = [{"h": 2, "w": 3}[axis] for axis in axes]
    groups = [layout.mesh.get_group(axis).group_name for axis in axes]
    generator = torch.Generator().manual_seed(5)
    errors = {}
    for kernel, stride, memory in ((3, 1, torch.channels_last), (7, 2, torch.contiguous_format)):
        sizes, at = (2, 16, 40, 48), ([stride] * 2, [kernel // 2] * 2, [1, 1])
        x = torch.randn(sizes, generator=generator).to(device, memory_format=memory).requires_grad_()
        weight = torch.randn(24, 16, kernel, kernel, generator=generator).to(device).requires_grad_()
        y = torch.nn.functional.conv2d(x, weight, None, *at)
        dy = torch.randn(y.shape, generator=generator).to(device)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        part, dpart = x.detach()[layout.tile(sizes)].clone(), dy[layout.tile(y.shape)].clone()
        cut = (1, dims, [sizes[dim] for dim in dims], groups)
        found = torch.ops.torchtp.border_convolution(part, weight.detach(), None, *at, *cut)
        mine = torch.ops.torchtp.border_convolution_backward(dpart, part, weight.detach(), *at, *cut)
        dist.all_reduce(mine[1])
        pairs = {
            "output": (found, y[layout.tile(y.shape)]),
            "dx": (mine[0], dx[layout.tile(sizes)]),
            "dw": (mine[1], dw),
        }
        for name, (own, whole) in pairs.items():
            errors[f"{name}, {kernel}x{kernel}"] = _same(own, whole.detach(), 1e-4, name)
    return {"largest_error": max(errors.values()), "of": max(errors, key=lambda key: errors[key])}


def graph(dry: bool) -> dict[str, Any]:
    """A cut convolution captured in a CUDA graph gives on replay what it gives eagerly."""
    device, rank, size = start(dry), dist.get_rank(), dist.get_world_size()
    if dry:
        return {"skipped": "needs a card"}
    group = dist.new_group()
    extent = 8 * size
    weight = torch.randn(16, 1, 7, 7, generator=torch.Generator().manual_seed(0)).to(device)
    part = torch.randn(2, 16, 9, 8, generator=torch.Generator().manual_seed(rank)).to(device)

    def run() -> Tensor:
        two = [1, 1], [3, 3], [1, 1]
        return torch.ops.torchtp.convolution(
            part, weight, None, *two, False, [0, 0], 16, [3], [extent], [group.group_name]
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    dist.barrier()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = run()
    for turn in range(5):  # plain calls use the two slots in turns, the replay always the same one
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(10 * turn + rank)))
        torch.cuda.synchronize()
        dist.barrier()
        captured.replay()
        torch.cuda.synchronize()
        found = out.clone()
        _same(found, run(), 0, f"replay {turn}")
        torch.cuda.synchronize()
        dist.barrier()
    return {}


def deadline(dry: bool) -> dict[str, Any]:
    """One rank stays away: all get an error that names it, soon, the late one too, and the device still answers."""
    device, rank, size = start(dry), dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    store = dist.distributed_c10d._get_default_store()
    begins, ends = [0] * size, [4 * size] * size
    part = torch.ones(1, 2, 4, 3, device=device)

    def pull() -> None:
        torch.ops.torchtp.pull(part, 2, 4 * size, begins, ends, group.group_name)
        # A device's trouble is told by the next exchange, or to who asks after waiting for it.
        if device.type == "cuda":
            torch.cuda.synchronize()
            _C.check_exchanges(group.group_name)

    with mock.patch.dict(os.environ, TORCHTP_EXCHANGE_TIMEOUT="3"):  # read when the group's first exchange is made
        pull()
    message = ""
    try:
        if rank == size - 1:
            store.wait([f"deadline {r}" for r in range(size - 1)])
        began = time.monotonic()
        try:
            pull()
        except RuntimeError as error:
            message = str(error)
        waited = time.monotonic() - began
    finally:
        store.set(f"deadline {rank}", "done")
        store.wait([f"deadline {r}" for r in range(size)])
    if "timeout" not in message:
        raise AssertionError(f"a pull that rank {size - 1} joined too late said on rank {rank}: {message or 'nothing'}")
    torch.zeros(8, device=device).add_(1).sum().item()
    return {"message": message[:500], "waited_s": round(waited, 2)}
