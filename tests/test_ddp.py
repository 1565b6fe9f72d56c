"""DistributedDataParallel on the backend torchtp: every option and hook gives gloo's parameters, to the bit on two ranks."""

import copy
import inspect
import unittest.mock

import as_gloo
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision


class Network(nn.Module):
    """A convolution, buffers that change, and a branch that some steps do not use."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.unused, self.head = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x, skip=True):
        x = self.norm(self.enter(x)).relu().mean((2, 3))
        return self.head(x) if skip else self.head(x) + self.unused(x)


def data(steps, seed=0):
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(steps)]


def train(model, optimizer=None, steps=4, skip=False, accumulate=False, average=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, image in enumerate(data(steps)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if accumulate:
            with model.no_sync():
                model(image.flip(3), skip).square().mean().backward()
        model(image, skip).square().mean().backward()
        optimizer.step()
        if average is not None:
            average.average_parameters(model.parameters())
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def network():
    torch.manual_seed(0)
    return Network()


def default():
    return train(DistributedDataParallel(network()))


def many_buckets():
    return train(DistributedDataParallel(network(), bucket_cap_mb=0.0001))


def unused_parameters():
    return train(DistributedDataParallel(network(), find_unused_parameters=True), skip=True)


def skipped_unused_parameters():
    return train(
        DistributedDataParallel(network(), find_unused_parameters=True, skip_all_reduce_unused_params=True), skip=True
    )


def bucket_views():
    return train(DistributedDataParallel(network(), gradient_as_bucket_view=True), accumulate=True)


def static_graph():
    return train(DistributedDataParallel(network(), static_graph=True), skip=True)


def static_graph_of_many_buckets():
    return train(DistributedDataParallel(network(), static_graph=True, bucket_cap_mb=0.0001))


def own_buffers():
    return train(DistributedDataParallel(network(), broadcast_buffers=False))


def no_first_broadcast():
    return train(DistributedDataParallel(network(), init_sync=False))


def no_check_of_reduction():
    return train(DistributedDataParallel(network(), check_reduction=True))


def first_broadcast():
    torch.manual_seed(dist.get_rank())
    return train(DistributedDataParallel(Network()))


def group_of_its_own():
    group = dist.new_group()
    results = train(DistributedDataParallel(network(), process_group=group))
    dist.destroy_process_group(group)
    return results


def device_mesh():
    return train(DistributedDataParallel(network(), device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


def mixed_precision():
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return train(DistributedDataParallel(network(), mixed_precision=config))


def waiting(all_reduce):
    def call(tensor, *args, async_op=False, **kwargs):
        return all_reduce(tensor, *args, **kwargs)

    return call


def delayed_parameters():
    """Nobody waits for the allreduce that the hook starts. Gloo's threads run it beside others, and a run in ten of gloo's
    gives other parameters: there it is waited for. The backend torchtp keeps a group's calls in order."""
    if dist.get_backend() == "gloo":
        with unittest.mock.patch.object(dist, "all_reduce", waiting(dist.all_reduce)):
            return with_delayed_parameters()
    return with_delayed_parameters()


def with_delayed_parameters():
    model = network()
    names = ["unused.weight", "unused.bias"]
    delayed = [(name, parameter) for name, parameter in model.named_parameters() if name in names]
    return train(
        DistributedDataParallel(
            model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.head.weight
        ),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


def newer_options():
    """Those of torch 2.13 and later."""
    newer = {"bucket_cap_mb_list": [1, 2], "batched_grad_copy": True, "forward_sync_buffers": False}
    known = inspect.signature(DistributedDataParallel).parameters
    return train(DistributedDataParallel(network(), **{key: value for key, value in newer.items() if key in known}))


def batch_norm_of_all_ranks():
    return train(DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(network())))


OPTIONS = [
    default,
    many_buckets,
    unused_parameters,
    skipped_unused_parameters,
    bucket_views,
    static_graph,
    static_graph_of_many_buckets,
    own_buffers,
    no_first_broadcast,
    no_check_of_reduction,
    first_broadcast,
    group_of_its_own,
    device_mesh,
    mixed_precision,
    delayed_parameters,
    newer_options,
    batch_norm_of_all_ranks,
]


def hooked(hook, state=None, **options):
    model = DistributedDataParallel(network(), **options)
    model.register_comm_hook(state, hook)
    return train(model)


def allreduce_hook():
    return hooked(default_hooks.allreduce_hook, dist.group.WORLD)


def fp16_hook():
    return hooked(default_hooks.fp16_compress_hook)


def bf16_hook():
    return hooked(default_hooks.bf16_compress_hook)


def fp16_wrapper():
    return hooked(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


def bf16_wrapper():
    return hooked(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), gradient_as_bucket_view=True)


def power_sgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return hooked(powerSGD_hook.powerSGD_hook, state)


def batched_power_sgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return hooked(powerSGD_hook.batched_powerSGD_hook, state)


def post_local_sgd():
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_group(), start_localSGD_iter=2)
    model = DistributedDataParallel(network())
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    return train(model, optimizer)


def no_hook():
    return hooked(debugging_hooks.noop_hook)


def quantized_tensors():
    return hooked(quantization_hooks.quantization_pertensor_hook, dist.group.WORLD)


def built_in_hook():
    model = DistributedDataParallel(network())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return train(model)


def python_hook_that_chains():
    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 3).then(lambda done: done.value() * 2)

    return hooked(hook)


def zero_redundancy():
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    results = train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        results += [state[index]["exp_avg"].clone() for index in sorted(state)]
    return results


def zero_redundancy_in_buckets():
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    return train(
        model,
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1),
    )


def averaged_models():
    averager = PeriodicModelAverager(period=2)
    model = network()
    return train(model, average=averager)


HOOKS = [
    allreduce_hook,
    fp16_hook,
    bf16_hook,
    fp16_wrapper,
    bf16_wrapper,
    power_sgd,
    batched_power_sgd,
    post_local_sgd,
    no_hook,
    built_in_hook,
    python_hook_that_chains,
    quantized_tensors,
    zero_redundancy,
    zero_redundancy_in_buckets,
    averaged_models,
]


def uneven_inputs():
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for image in data(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(image, False).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def uneven_inputs_of_two_joinables():
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for image in data(2 + dist.get_rank()):
            optimizer.zero_grad()
            model(image, False).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def an_early_end_that_raises():
    model = DistributedDataParallel(network())
    raised = False
    try:
        with model.join(throw_on_early_termination=True):
            for image in data(1 + dist.get_rank()):
                model(image, False).square().mean().backward()
    except RuntimeError:
        raised = True
    dist.barrier()
    return [torch.tensor(raised)]


# What torch refuses or fails with on CPU, on every backend.
FOR_GPUS = [mixed_precision, batch_norm_of_all_ranks, bf16_hook, bf16_wrapper, batched_power_sgd, quantized_tensors]
JOINS = [uneven_inputs, uneven_inputs_of_two_joinables, an_early_end_that_raises]


@pytest.mark.parametrize("cases", [OPTIONS, HOOKS, JOINS], ids=["options", "hooks", "join"])
def test_two_ranks_train_as_on_gloo_to_the_bit(cases):
    as_gloo.check(cases, 2, fails_on_gloo=[case.__name__ for case in FOR_GPUS])


def in_double(case):
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return case()
    finally:
        torch.set_default_dtype(dtype)


def three_ranks():
    return [
        tensor
        for case in (default, many_buckets, bucket_views, static_graph, uneven_inputs)
        for tensor in in_double(case)
    ]


def test_three_ranks_train_as_on_gloo():
    as_gloo.check([three_ranks], 3, exact=False)


def copied_and_saved():
    """A DDP model can be copied and pickled, and goes on with its group."""
    model = DistributedDataParallel(network())
    train(model)
    return train(copy.deepcopy(model))


def test_a_copy_goes_on():
    as_gloo.check([copied_and_saved], 2)
