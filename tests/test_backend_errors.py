"""What the backend torchtp says when ranks disagree, leave or ask for the impossible: an error on all, no hang."""

import datetime
from functools import partial

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks

Op = dist.ReduceOp


def _error_of(call):
    try:
        call()
    except dist.DistBackendError as error:
        return str(error)
    return None


def _shapes(rank, group):
    dist.all_reduce(torch.ones(10 + rank), group=group)


def _dtypes(rank, group):
    dist.all_reduce(torch.ones(10, dtype=torch.float64 if rank == 1 else torch.float32), group=group)


def _reduce_ops(rank, group):
    dist.all_reduce(torch.ones(10), Op.MAX if rank == 1 else Op.SUM, group=group)


def _kinds(rank, group):
    dist.broadcast(torch.ones(10), 0, group=group) if rank == 1 else dist.all_reduce(torch.ones(10), group=group)


def _roots(rank, group):
    dist.broadcast(torch.ones(10), min(rank, 1), group=group)


def _large_shapes(rank, group):
    dist.all_gather_into_tensor(
        torch.empty(dist.get_world_size() * (10**6 + rank)), torch.ones(10**6 + rank), group=group
    )


def _asynchronous(rank, group):
    dist.all_reduce(torch.ones(10 + rank), async_op=True, group=group).wait()


def _barrier_against_reduce(rank, group):
    dist.barrier(group) if rank == 1 else dist.all_reduce(torch.ones(10), group=group)


def _unequal_lists(rank, group):
    lengths = [4, 4, 4] if rank == 1 else [3, 4, 4]
    pieces = [torch.ones(n) for n in lengths[: dist.get_world_size()]]
    dist.reduce_scatter(torch.empty(lengths[rank]), pieces, group=group)


def _unequal_outputs(rank, group):
    lengths = [4, 4, 4] if rank == 1 else [3, 4, 4]
    pieces = [torch.ones(n) for n in lengths[: dist.get_world_size()]]
    dist.all_gather(pieces, torch.ones(lengths[rank]), group=group)


def _refusal(rank, group):
    """Only rank 1 can see that its own call is impossible; it says something else than the others."""
    try:
        dist.all_reduce(torch.ones(10, dtype=torch.float32), Op.BAND if rank == 1 else Op.SUM, group=group)
    except dist.DistBackendError:
        raise
    except RuntimeError as error:
        raise dist.DistBackendError("refused: " + str(error)) from error


def _collect(call):
    """What a group of its own answers: an error ends its group, and only it."""
    group = dist.new_group()
    error = _error_of(lambda: call(dist.get_rank(), group))
    dist.destroy_process_group(group)
    return error


@pytest.mark.parametrize(
    ("call", "both_sides"),
    [
        (_shapes, ("allreduce #0 (SUM, fp32, 10 elements)", "allreduce #0 (SUM, fp32, 11 elements)")),
        (_dtypes, ("allreduce #0 (SUM, fp32, 10 elements)", "allreduce #0 (SUM, fp64, 10 elements)")),
        (_reduce_ops, ("allreduce #0 (SUM, fp32, 10 elements)", "allreduce #0 (MAX, fp32, 10 elements)")),
        (_kinds, ("allreduce #0 (SUM, fp32, 10 elements)", "broadcast #0 (fp32, 10 elements, root 0)")),
        (_roots, ("broadcast #0 (fp32, 10 elements, root 0)", "broadcast #0 (fp32, 10 elements, root 1)")),
        (_large_shapes, ("allgather #0 (fp32, 1,000,000 elements)", "allgather #0 (fp32, 1,000,001 elements)")),
        (_asynchronous, ("allreduce #0 (SUM, fp32, 10 elements)", "allreduce #0 (SUM, fp32, 11 elements)")),
        (_barrier_against_reduce, ("allreduce #0 (SUM, fp32, 10 elements)", "barrier #0")),
        (
            _unequal_lists,
            ("reduce_scatter #0 (SUM, fp32, 3 elements, root 0)", "reduce_scatter #0 (SUM, fp32, 4 elements)"),
        ),
        (_unequal_outputs, ("allgather #0 (fp32, 3 elements, root 0)", "allgather #0 (fp32, 4 elements)")),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_do_not_match_give_one_error_on_all_ranks(call, both_sides, size):
    errors = run_ranks(_collect, size, call, backend="torchtp")
    assert len(set(errors)) == 1, errors
    for text in (*both_sides, "rank 0", "rank 1"):
        assert text in errors[0]


def test_a_call_that_one_rank_refuses_fails_on_the_others():
    errors = run_ranks(_collect, 3, _refusal, backend="torchtp")
    assert "BAND has no meaning for dtype Float" in errors[1]
    for error in (errors[0], errors[2]):
        assert "which it refused itself" in error and "rank 1" in error


def _unequal_splits():
    rank = dist.get_rank()
    splits = [3, 4] if rank == 0 else [5, 5]
    output = torch.empty(8 if rank == 0 else 9)
    first = _error_of(
        lambda: dist.all_to_all_single(output, torch.ones(sum(splits)), [3, 5] if rank == 0 else [4, 5], splits)
    )
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is still in step
    assert tensor.item() == 2
    second = _error_of(
        lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6), [3, 3] if rank == 0 else [2, 4], [3, 3])
    )
    return first, second


def test_splits_that_do_not_agree_give_one_error_on_all_ranks():
    errors = run_ranks(_unequal_splits, 2, backend="torchtp")
    assert errors[0] == errors[1]
    assert errors[0][0] is None
    assert "rank 0 sends 12 bytes to rank 1, which expects 8" in errors[0][1]


def _impossible(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # all ranks refused alike, so the group goes on
    assert (tensor == dist.get_world_size()).all()


def _bitwise_float():
    _impossible(lambda: dist.all_reduce(torch.ones(3), Op.BOR), "BOR has no meaning for dtype Float")


def _average_bool():
    _impossible(lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), Op.AVG), "AVG has no meaning for dtype Bool")


def _wrong_output():
    size = dist.get_world_size()
    group = dist.group.WORLD
    output, tensor = torch.empty(size * 3 + 1), torch.ones(3)
    _impossible(lambda: group._allgather_base(output, tensor).wait(), f"expected a tensor of {3 * size} elements")


def _wrong_root():
    options = dist.BroadcastOptions()
    options.rootRank = 7
    _impossible(lambda: dist.group.WORLD.broadcast([torch.ones(3)], options).wait(), "root must be a rank of the group")


def _negative_splits():
    tensor = torch.ones(4)
    for splits in ([-1, 5], [2**62, 2**62]):
        _impossible(lambda splits=splits: dist.all_to_all_single(tensor, tensor, splits, splits), "none negative")


def _expanded_outputs():
    tensor, peer = torch.ones(1).expand(4), 1 - dist.get_rank()
    gathered = [tensor] * dist.get_world_size()
    for call in (
        lambda: dist.broadcast(tensor, 1),
        lambda: dist.reduce(tensor, 0),
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_gather(gathered, torch.ones(4)),
        lambda: dist.all_to_all_single(tensor, torch.ones(4)),
        lambda: dist.recv(tensor, peer),
    ):
        _impossible(call, "elements of this tensor share memory")


def _impossible_memory():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for size, dtype, device, message in (
        (4, torch.quint8, "cpu", "needs a quantizer"),
        (4, torch.float32, "meta", "of the CPU or of a CUDA device"),
        (-1, torch.float32, "cpu", "cannot be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.allocate_tensor(size, dtype=dtype, device=torch.device(device))


def _impossible_timeout():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for seconds in (0, -1):
        with pytest.raises(ValueError, match="timeout of a process group must be positive"):
            backend.set_timeout(datetime.timedelta(seconds=seconds))
    dist.barrier()


CASES = [
    _impossible_memory,
    _impossible_timeout,
    _bitwise_float,
    _average_bool,
    _wrong_output,
    _wrong_root,
    _negative_splits,
    _expanded_outputs,
]


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_done_is_refused_and_the_group_goes_on(case):
    run_ranks(case, 2, backend="torchtp")


def _missing_rank(rank, group):
    options = dist.BarrierOptions()
    options.timeout = datetime.timedelta(seconds=3)
    if rank != 1:
        group.barrier(options).wait()


def test_a_rank_that_does_not_come_is_named():
    errors = run_ranks(_collect, 3, _missing_rank, backend="torchtp")
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert "rank 1" in error and "barrier" in error


def _dead_rank():
    if dist.get_rank() == 1:
        import os

        os._exit(3)
    return _error_of(dist.barrier)


def test_a_rank_that_dies_is_an_error_for_the_others():
    with pytest.raises(Exception, match="rank 1 died with exit status 3"):
        run_ranks(_dead_rank, 3, backend="torchtp", fresh=True)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


_EXCEPTIONS = {
    "ValueError: no sample 17": ValueError("no sample 17\nin the folder"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "Unspeakable": Unspeakable(),
    "OSError: " + "x" * 200 + "...": OSError("x" * 1000),
    "LookupError": LookupError("\udcff"),
    "LookupError: ??": LookupError("ü"),
}


def _left_by(exception):
    group = dist.new_group()
    if dist.get_rank() == 0:
        return _error_of(lambda: dist.all_reduce(torch.ones(4), group=group))
    try:
        raise exception
    except BaseException:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("told", _EXCEPTIONS)
def test_a_rank_that_leaves_by_an_error_tells_it(told):
    first, _ = run_ranks(_left_by, 2, _EXCEPTIONS[told], backend="torchtp")
    assert f"rank 1 left the group ({told}) while rank 0 waited in allreduce" in first


def _fails_in_a_part():
    part = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    if dist.get_rank() == 2:
        return part._get_backend(torch.device("cpu")).abort()
    return _error_of(lambda: dist.barrier(part))


def test_a_group_of_some_ranks_says_which_they_are():
    _, error, _ = run_ranks(_fails_in_a_part, 3, backend="torchtp")
    assert " (global ranks 1, 2): rank 1 called abort()" in error


def _aborted(rank, group):
    if rank == 1:
        group._get_backend(torch.device("cpu")).abort()
    else:
        dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()


def test_abort_ends_the_calls_of_all_ranks():
    errors = run_ranks(_collect, 2, _aborted, backend="torchtp")
    assert "rank 1 called abort()" in errors[0]


def _after_shutdown(rank, group):
    dist.barrier(group)
    group._get_backend(torch.device("cpu")).shutdown()
    dist.all_reduce(torch.ones(1), group=group)


def test_a_group_that_was_shut_down_says_so():
    for error in run_ranks(_collect, 2, _after_shutdown, backend="torchtp"):
        assert "the process group has been shut down" in error


def _message_of_another_size(rank):
    return torch.ones(10 + rank)


def _message_of_another_type(rank):
    return torch.ones(4).view(torch.float32 if rank else torch.float64)


def _met(rank, group, make, is_late):
    """Rank 0's message, which has come before rank 1 asks for it or not."""
    work = dist.isend(make(rank), 1, group=group) if rank == 0 else None
    if is_late:
        dist.barrier(group)
    if work:
        work.wait()
        dist.recv(torch.ones(1), 1, group=group)
    else:
        dist.recv(make(rank), 0, group=group)


MESSAGES = {
    _message_of_another_size: ("44 bytes of fp32", "40 bytes of fp32"),
    _message_of_another_type: ("16 bytes of fp32", "16 bytes of fp64"),
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("make", MESSAGES)
def test_a_message_of_other_contents_is_an_error_that_names_both(make, is_late):
    received, sent = MESSAGES[make]
    for error in run_ranks(_collect, 2, partial(_met, make=make, is_late=is_late), backend="torchtp"):
        assert f"receives {received} with tag 0 from rank 0, which sent {sent}" in error


@pytest.mark.parametrize("rank", [2, 2**31 - 1])
def test_a_rank_outside_of_the_group_is_refused_at_once(rank):
    with pytest.raises(ValueError, match=f"ranks 0 to 1, but this one is given rank {rank}"):
        dist.init_process_group("torchtp", store=dist.HashStore(), rank=rank, world_size=2)
