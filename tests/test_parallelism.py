"""PyTorch's own ways to train in parallel, on the backend torchtp: the same as on gloo."""

import shutil
import tempfile
from unittest import mock

import as_gloo
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from as_gloo import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocMixin
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def mesh_of_all(name="all"):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        return x + self.leave(F.gelu(self.enter(self.norm(x))))


def blocks(count=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(7) for _ in range(count))).double()


def batch(step, shape=(4, 7)):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]


def sharded(**options):
    model = blocks()
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp():
    return train(sharded(mesh=mesh_of_all()))


def fsdp_kept_whole_after_forward():
    return train(sharded(mesh=mesh_of_all(), reshard_after_forward=False))


def in_shared_memory(tensor):
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file if "memfd" in line]
    return any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in ranges)


def fsdp_in_memory_of_the_group():
    """What FSDP sends lies in the segment, so that collectives copy nothing. gloo has no memory to give."""
    if dist.get_backend() == "gloo":
        return fsdp()
    model, lent = sharded(mesh=mesh_of_all()), []
    for module in (*model, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    allocate = ProcessGroupAllocMixin.allocate

    def spy(self, *args, **kwargs):
        tensor = allocate(self, *args, **kwargs)
        lent.append(in_shared_memory(tensor))
        return tensor

    with mock.patch.object(ProcessGroupAllocMixin, "allocate", spy):
        results = train(model)
    assert len(lent) > 6 and all(lent), lent
    return results


def fsdp_in_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    return train(sharded(mesh=mesh_of_all(), mp_policy=policy))


def fsdp_without_sync():
    model = sharded(mesh=mesh_of_all())
    model.set_requires_gradient_sync(False)
    model(batch(7)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    return train(model)


def fsdp_saved_and_loaded():
    """A distributed checkpoint of model and optimizer, loaded into another model, also asynchronously saved."""
    model = sharded(mesh=mesh_of_all())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None for _ in range(2)]
    dist.broadcast_object_list(folders)
    results = []
    for folder, save in zip(folders, (checkpoint.save, checkpoint.async_save), strict=True):
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        done = save(states, checkpoint_id=folder)
        if done is not None and hasattr(done, "result"):
            done.result()
        torch.manual_seed(1)
        other = fully_shard(nn.Sequential(Block(7), Block(7)).double(), mesh=mesh_of_all())
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
        states = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
        checkpoint.load(states, checkpoint_id=folder)
        set_state_dict(other, other_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        other(batch(1)).square().mean().backward()
        other_optimizer.step()
        results += [whole(parameter) for parameter in other.parameters()]
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in folders:
            shutil.rmtree(folder)
    return results


FSDP = [
    fsdp,
    fsdp_kept_whole_after_forward,
    fsdp_in_memory_of_the_group,
    fsdp_in_mixed_precision,
    fsdp_without_sync,
    fsdp_saved_and_loaded,
]


def redistributed():
    size = dist.get_world_size()
    mesh = mesh_of_all()
    full = torch.arange(size * 5 * 3, dtype=torch.float64).view(size * 5, 3)[: size * 5 - 1]
    results = []
    for placement in (Shard(0), Shard(1), Replicate()):
        for target in (Shard(0), Shard(1), Replicate()):
            results.append(whole(distribute_tensor(full, mesh, [placement]).redistribute(mesh, [target])))
    return results


def sharded_matrix_products():
    mesh = mesh_of_all()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    results = []
    for left in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(a.clone().requires_grad_(), mesh, [left])
        y = distribute_tensor(b.clone().requires_grad_(), mesh, [Shard(0)])
        z = (x @ y).softmax(1)
        z.square().sum().backward()
        results += [whole(z), whole(x.grad), whole(y.grad)]
    return results


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.leave(self.enter(self.norm(x)).relu())


def feed():
    torch.manual_seed(0)
    return Feed().double()


def trained(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        results.append(whole(output))
    return results + [whole(parameter) for parameter in model.parameters()]


def same_on_all(shape=(4, 6, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def tensor_parallel():
    model = parallelize_module(feed(), mesh_of_all(), {"enter": ColwiseParallel(), "leave": RowwiseParallel()})
    return trained(model, same_on_all())


def sequence_parallel():
    plan = {
        "norm": SequenceParallel(),
        "enter": ColwiseParallel(input_layouts=Shard(1)),
        "leave": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    model = parallelize_module(feed(), mesh_of_all(), plan)
    x = distribute_tensor(same_on_all(), mesh_of_all(), [Shard(1)])
    return trained(model, x)


def prepared_inputs():
    plan = {"": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)}
    model = parallelize_module(feed(), mesh_of_all(), plan)
    return [model(batch(0, (2, 8))).detach()]


def losses_of_sharded_classes():
    mesh = mesh_of_all()
    logits = distribute_tensor(same_on_all((6, 8)).requires_grad_(), mesh, [Shard(1)])
    with loss_parallel():
        loss = F.cross_entropy(logits, torch.arange(6) % 8)
        loss.backward()
    return [whole(loss), whole(logits.grad)]


def sequences_cut_and_joined():
    """What context parallelism does on CPU: attention over a cut sequence exists for CUDA alone."""
    mesh, results = mesh_of_all(), []
    buffers = [same_on_all((2, 3, 8 * dist.get_world_size(), 4)), same_on_all((2, 3, 8 * dist.get_world_size(), 4)) + 1]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2], no_restore_buffers=set(buffers)):
        results += [buffer.clone() for buffer in buffers]
        results += context_parallel_unshard(mesh, buffers, [2, 2])
    return results


PLACED = [
    redistributed,
    sharded_matrix_products,
    tensor_parallel,
    sequence_parallel,
    prepared_inputs,
    losses_of_sharded_classes,
    sequences_cut_and_joined,
]


def pipeline(schedule):
    size, rank = dist.get_world_size(), dist.get_rank()
    model = blocks(size)
    stage = PipelineStage(model[rank], rank, size, torch.device("cpu"))
    run = schedule(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(model[rank].parameters(), lr=0.1)
    x, target = same_on_all((8, 7)), same_on_all((8, 7)) + 1
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = []
        inputs = (x,) if rank == 0 else ()
        output = run.step(*inputs, **({"target": target, "losses": losses} if rank == size - 1 else {}))
        results += [output.detach(), *(loss.detach() for loss in losses)] if rank == size - 1 else []
        optimizer.step()
    return results + [parameter.detach().clone() for parameter in model[rank].parameters()]


def pipeline_gpipe():
    return pipeline(ScheduleGPipe)


def pipeline_1f1b():
    return pipeline(Schedule1F1B)


def functions_with_gradients():
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []

    def derive(function, *inputs):
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        sum((i + 1) * (output.square() * (rank + 1)).sum() for i, output in enumerate(outputs)).backward()
        results.extend(output.detach().clone() for output in outputs)
        results.extend(tensor.grad for tensor in inputs if tensor.grad is not None)

    x, parts = batch(0), [batch(10 + r) for r in range(size)]
    derive(differentiable.all_reduce, x)
    derive(lambda x: differentiable.all_reduce(x, dist.ReduceOp.MAX), x)
    derive(lambda x: differentiable.broadcast(x, size - 1), x)
    derive(lambda x: differentiable.reduce(x, 0) * (rank == 0), x)  # elsewhere gloo leaves what it met on the way
    derive(differentiable.all_gather, x)
    derive(lambda x: differentiable.gather(x, 0), x)
    derive(lambda *parts: differentiable.scatter(list(parts), 0), *parts)
    derive(lambda *parts: differentiable.reduce_scatter(torch.empty_like(x), list(parts)), *parts)
    derive(lambda *parts: differentiable.all_to_all([torch.empty_like(x) for _ in parts], list(parts)), *parts)
    derive(lambda x: differentiable.all_to_all_single(torch.empty_like(x), x), torch.cat(parts)[: 2 * size])
    return results


def collectives_in_a_graph(x):
    group, size = dist.group.WORLD, dist.get_world_size()
    y = functional.all_reduce(x * 2, "sum", group)
    y = y + functional.all_reduce(x, "max", group) + functional.broadcast(x, 0, group)
    gathered = functional.all_gather_tensor(y.sin(), 0, group)
    back = functional.reduce_scatter_tensor(gathered.cos(), "avg", 0, group)
    swapped = functional.all_to_all_single(gathered, None, None, group)
    first, second = functional.all_reduce_coalesced([back, back + 1], "sum", group)
    return y, gathered, back + first, swapped + second.repeat(size, 1)


def graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(collectives_in_a_graph, backend=backend, fullgraph=True)
    results = [tensor.clone() for step in range(2) for tensor in compiled(batch(step))]
    for actual, step in zip((results[:4], results[4:]), range(2), strict=True):
        for mine, wanted in zip(actual, collectives_in_a_graph(batch(step)), strict=True):
            torch.testing.assert_close(mine, wanted + 0, rtol=1e-12, atol=1e-12)
    return results


def compiled_graph():
    return graph("aot_eager")


def compiled_graph_of_inductor():
    return graph("inductor")


def compiled_gradients():
    group = dist.group.WORLD

    def loss(x):
        y = functional.all_gather_tensor_autograd(x.sin(), 0, group)
        return (functional.reduce_scatter_tensor_autograd(y * y, "sum", 0, group) * x).sum()

    torch._dynamo.reset()
    x = batch(0).requires_grad_()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(x).backward()
    return [x.grad]


TALKING = [pipeline_gpipe, pipeline_1f1b, functions_with_gradients, compiled_graph, compiled_gradients]


@pytest.mark.parametrize("cases", [FSDP, PLACED, TALKING], ids=["fsdp", "placed", "talking"])
def test_two_ranks_are_as_on_gloo_to_the_bit(cases):
    as_gloo.check(cases, 2, timeout=200)


def hybrid():
    return train(sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))


def tensor_parallel_inside_fsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(feed(), mesh["tensor"], {"enter": ColwiseParallel(), "leave": RowwiseParallel()})
    return trained(fully_shard(model, mesh=mesh["data"]), same_on_all())


def test_meshes_of_four_ranks_are_as_on_gloo():
    as_gloo.check([hybrid, tensor_parallel_inside_fsdp, pipeline_1f1b], 4, exact=False, timeout=200)


@pytest.mark.long
def test_the_graph_of_inductor_is_as_on_gloo():
    as_gloo.check([compiled_graph_of_inductor], 2, timeout=300)
