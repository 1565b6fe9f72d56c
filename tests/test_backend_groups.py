"""Groups of the backend torchtp: subgroups, overlaps, meshes, ends and new beginnings, several at once."""

import datetime
import gc
import threading

import pytest
import torch
import torch.distributed as dist
from forked import forked, served_store
from torch.distributed.device_mesh import init_device_mesh

from torchtp.testing import run_ranks


def _sum_over(group, value):
    tensor = torch.full((3,), float(value))
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def _subgroups():
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [[0, 1], [1, 2], [0, size - 1], list(range(size)), [2]]
    groups = [dist.new_group(ranks) for ranks in members]
    for _ in range(20):
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                assert _sum_over(group, rank + 1) == sum(r + 1 for r in ranks)
    for group in groups:
        dist.destroy_process_group(group)
    assert _sum_over(None, 1) == size


@pytest.mark.parametrize("size", [3, 4])
def test_overlapping_subgroups_do_not_disturb_each_other(size):
    run_ranks(_subgroups, size, backend="torchtp")


def _parts():
    """Groups as objects, which c10d does not register: parts of one, parts of parts, and two of them as one again."""
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    options = world._get_backend(torch.device("cpu")).options
    before = (options.group_name, options._timeout)
    even, odd = list(range(0, size, 2)), list(range(1, size, 2))
    ranks = odd if rank % 2 else even
    part = world.split_group(ranks, timeout=datetime.timedelta(seconds=50), group_name=f"part {rank % 2}")
    assert (part.rank(), part.size()) == (rank // 2, len(ranks))
    tensor = torch.tensor([float(rank)])
    part.allreduce([tensor]).wait()
    assert tensor.item() == sum(ranks)
    made = part._get_backend(torch.device("cpu")).options
    assert (made.group_name, made._timeout) == (f"part {rank % 2}", datetime.timedelta(seconds=50))
    assert made.global_ranks_in_group == ranks

    first = part.split_group([0])
    assert (first is None) == (part.rank() != 0)
    store = dist.PrefixStore("merged", world.get_group_store())
    merged = part.merge_remote_group(store, size, timeout=datetime.timedelta(seconds=50), group_name="merged")
    assert sorted(_gathered(merged, rank)) == list(range(size))
    options = world._get_backend(torch.device("cpu")).options
    assert (options.group_name, options._timeout) == before  # of a gloo group splitting it changes them
    assert _sum_over(None, 1) == size


def _gathered(group, value):
    outputs = [torch.empty(1) for _ in range(group.size())]
    group.allgather([outputs], [torch.tensor([float(value)])]).wait()
    return [int(each) for each in outputs]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_group_is_split_and_merged(size):
    run_ranks(_parts, size, backend="torchtp")


def _mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    rank = dist.get_rank()
    row, column = divmod(rank, 2)
    assert _sum_over(mesh["w"].get_group(), rank) == 4 * row + 1
    assert _sum_over(mesh["h"].get_group(), rank) == 2 * column + 2
    flat = mesh._flatten("flat")
    assert _sum_over(flat.get_group(), rank) == 6


def test_a_mesh_of_four_ranks_has_its_groups():
    run_ranks(_mesh, 4, backend="torchtp")


def _again():
    size = dist.get_world_size()
    for _ in range(5):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(50_000), group=group, async_op=True)
        assert _sum_over(group, 1) == size
        work.wait()
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    for _ in range(3):  # on the store that the first groups were made on
        dist.init_process_group("torchtp", timeout=datetime.timedelta(seconds=60))
        assert _sum_over(None, 1) == size
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups_end_and_begin_again_on_the_same_store(size):
    run_ranks(_again, size, backend="torchtp", fresh=True)


def _of_other_sizes(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    sums = []
    for size in (4, 2, 3, 4, 1, 4):
        if rank < size:
            dist.init_process_group("torchtp", store=store, rank=rank, world_size=size)
            sums.append(_sum_over(None, rank))
            dist.destroy_process_group()
    return sums


def test_groups_of_other_sizes_begin_on_the_same_store():
    with served_store() as (_, port):
        sums = forked(4, _of_other_sizes, port)
    assert sums == [[6, 1, 3, 6, 0, 6], [6, 1, 3, 6, 6], [6, 3, 6, 6], [6, 6, 6]]


def _unwaited():
    """Ends with work queued, a live DDP and a Python callback: nobody waits for Python's lock while holding it."""
    size = dist.get_world_size()
    seen = []
    for _ in range(10):
        group = dist.new_group()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
        model.register_comm_hook(None, _hook)
        model(torch.ones(2, 8)).sum().backward()
        for _ in range(5):
            tensor = torch.ones(10_000)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.get_future().add_done_callback(lambda future: seen.append(future.value()[0][0].item()))
        dist.destroy_process_group(group)
        del model, group
        gc.collect()
    assert seen == [float(size)] * 50


def _hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_ends_with_work_and_callbacks_under_way(size):
    run_ranks(_unwaited, size, backend="torchtp", timeout=100)


def _at_once():
    """Two threads, a group each: they share nothing but the process."""
    size = dist.get_world_size()
    groups = [dist.new_group() for _ in range(2)]
    sums: list[list[float]] = [[], []]

    def use(index):
        for numel in (10, 40_000, 300_000) * 5:
            tensor = torch.full((numel,), float(index + 1))
            dist.all_reduce(tensor, group=groups[index])
            sums[index].append(tensor[-1].item())

    threads = [threading.Thread(target=use, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[float(size)] * 15, [2.0 * size] * 15]


@pytest.mark.parametrize("size", [2, 3])
def test_groups_are_used_by_several_threads_at_once(size):
    run_ranks(_at_once, size, backend="torchtp")


def _interleaved():
    """Asynchronous work on several groups, waited for in another order than it was issued."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    tensors = [torch.full((numel,), float(rank)) for numel in (5, 30_000, 500_000) for _ in groups]
    works = [dist.all_reduce(t, group=groups[i % 3], async_op=True) for i, t in enumerate(tensors)]
    gathered = torch.empty(size * 1000)
    works.append(dist.all_gather_into_tensor(gathered, torch.full((1000,), float(rank)), async_op=True))
    for work in reversed(works):
        work.wait()
    assert all((tensor == size * (size - 1) / 2).all() for tensor in tensors)
    assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(1000))


@pytest.mark.parametrize("size", [2, 4])
def test_work_on_several_groups_may_be_waited_for_in_any_order(size):
    run_ranks(_interleaved, size, backend="torchtp")


def _memory():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensor = backend.allocate_tensor(10_000, dtype=torch.float32, device=torch.device("cpu"))
    assert tensor.shape == (10_000,) and tensor.dtype == torch.float32
    view = tensor[100:200]
    del tensor, backend
    dist.destroy_process_group()
    gc.collect()
    view.fill_(1)  # a tensor keeps the memory it lies in
    return view.sum().item()


def test_a_tensor_in_the_segment_outlives_its_group():
    assert run_ranks(_memory, 2, backend="torchtp", fresh=True) == [100.0, 100.0]
