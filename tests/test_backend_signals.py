"""A rank that waits for others runs the program's signal handlers; what they raise ends the wait, and the group on all ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from test_backend_errors import _error_of
from torch.distributed.device_mesh import DeviceMesh

import torchtp
from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks


class Impatient(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


@contextlib.contextmanager
def ticking(act, seconds=0.05):
    """Calls act() by SIGALRM, again and again, once this thread has been in one call of C++ for three ticks."""
    seen = []

    def tick(number, frame):
        seen.append((id(frame), frame.f_lasti))
        if len(seen) >= 3 and len(set(seen[-3:])) == 1:
            act()

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def raise_impatience():
    raise Impatient("no longer")


def _queued(group):
    dist.all_reduce(torch.ones(4), group=group, async_op=True)
    dist.all_reduce(torch.ones(4), group=group)


def _cut(group):
    layout = torchtp.Layout(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("h",)), {"h": -2})
    return torchtp.nn.convert(torch.nn.Conv2d(1, 1, 3, padding=1), layout), layout.from_tile(
        torch.ones(1, 1, 4, 8, requires_grad=True), (1, 1, 8, 8)
    )


def _halos(group):
    network, image = _cut(group)
    return lambda: network(image)


def _halos_of_gradients(group):
    network, image = _cut(group)
    output = network(image)
    return lambda: output.sum().backward()


# What both ranks do first gives what rank 0 then waits in.


WAITS = {
    "all_reduce": lambda group: lambda: dist.all_reduce(torch.ones(4), group=group),
    "a large all_reduce": lambda group: lambda: dist.all_reduce(torch.ones(1 << 20), group=group),
    "wait": lambda group: lambda: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(),
    "barrier": lambda group: lambda: dist.barrier(group),
    "the queue": lambda group: lambda: _queued(group),
    "recv": lambda group: lambda: dist.recv(torch.ones(4), 1, group=group),
    "irecv": lambda group: lambda: dist.irecv(torch.ones(4), 1, group=group).wait(),
    "from any": lambda group: lambda: dist.recv(torch.ones(4), group=group),
    "coalesced": lambda group: (
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(4), 1, group)])[0].wait()
    ),
    "objects": lambda group: lambda: dist.broadcast_object_list([None], 1, group=group),
    "reducer": lambda group: lambda: GradientReducer(torch.nn.Linear(2, 2), group),
    "halos": _halos,
    "halos of gradients": _halos_of_gradients,
}


def _interrupted(name):
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group()
    wait = WAITS[name](group)
    if dist.get_rank() == 0:
        with ticking(raise_impatience), pytest.raises(Impatient, match="no longer"):
            wait()
        store.set(f"raised in {name}", "yes")
    else:
        store.wait([f"raised in {name}"])
    errors = [_error_of(lambda: dist.all_reduce(torch.ones(4), group=group)) for _ in range(2)]
    dist.destroy_process_group(group)
    total = torch.ones(1)
    dist.all_reduce(total)  # other groups go on
    return [*errors, total.item()]


@pytest.mark.parametrize("name", WAITS)
def test_what_a_signal_handler_raises_ends_the_wait_and_the_group(name):
    answers = run_ranks(_interrupted, 2, name, backend="torchtp")
    for first, second, total in answers:
        assert "rank 0 was interrupted by a signal (Impatient: no longer) while it waited in" in first
        assert first == second
        assert total == 2
    assert answers[0] == answers[1]


def _interrupted_in_the_making():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with ticking(raise_impatience), pytest.raises(Impatient, match="no longer"):
            dist.new_group()
        store.set("raised in the making", "yes")
        return None
    store.wait(["raised in the making"])
    return _error_of(dist.new_group)


def test_a_group_that_is_being_made_is_given_up_by_all():
    _, error = run_ranks(_interrupted_in_the_making, 2, backend="torchtp", fresh=True)
    assert "rank 0 was interrupted by a signal (Impatient: no longer) while the group was being made" in error


def _handled():
    """Rank 0's handlers run while it waits, and it waits on."""
    store, total, calls = dist.distributed_c10d._get_default_store(), torch.ones(1), []
    if dist.get_rank() == 0:

        def act():
            calls.append(None)
            store.set("called", "yes")

        with ticking(act):
            dist.all_reduce(total)
        assert calls
    else:
        store.wait(["called"])
        dist.all_reduce(total)
    return total.item()


def test_a_signal_handler_that_returns_disturbs_nothing():
    assert run_ranks(_handled, 2, backend="torchtp", fresh=True) == [2, 2]


def _looked_at(by_thread):
    """The reducer, by another thread or a handler of this one, while it waits in backward for rank 1."""
    store, model = dist.distributed_c10d._get_default_store(), torch.nn.Linear(4, 4)
    reducer, seen, waits = GradientReducer(model), [], threading.Event()
    model(torch.ones(2, 4)).sum().backward()

    def look():
        seen.append(reducer.statistics.num_backwards)
        store.set(f"looked at: {by_thread}", "yes")

    if dist.get_rank() == 1:
        store.wait([f"looked at: {by_thread}"])
        model(torch.ones(2, 4)).sum().backward()
        return None
    if by_thread:
        thread = threading.Thread(target=lambda: (waits.wait(), store.set(f"looked at: {by_thread}", "yes"), look()))
        thread.start()
    with ticking(waits.set if by_thread else look):
        model(torch.ones(2, 4)).sum().backward()
    if by_thread:
        thread.join()
    return seen[0]


@pytest.mark.parametrize("by_thread", [False, True])
def test_a_reducer_may_be_looked_at_while_its_rank_waits_in_backward(by_thread):
    seen, _ = run_ranks(_looked_at, 2, by_thread, backend="torchtp", fresh=True)
    assert seen in (1, 2)


def _calling(name):
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group()
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1), group=group),
        "isend": lambda: dist.isend(torch.ones(1), 1, group=group),
        "destroy": lambda: (dist.destroy_process_group(group), raise_impatience()),
    }
    if dist.get_rank() == 0:
        with ticking(calls[name]), pytest.raises((dist.DistBackendError, Impatient)) as caught:
            dist.all_reduce(torch.ones(4), group=group)
        store.set(f"raised in {name}", "yes")
        return str(caught.value)
    store.wait([f"raised in {name}"])
    return _error_of(lambda: dist.all_reduce(torch.ones(4), group=group))


@pytest.mark.parametrize("name", ["all_reduce", "isend"])
def test_a_signal_handler_cannot_call_what_its_rank_waits_in(name):
    mine, other = run_ranks(_calling, 2, name, backend="torchtp", fresh=True)
    assert "cannot call" in mine and "set a flag in the handler" in mine
    assert "rank 0 was interrupted by a signal" in other and mine in other


def test_a_signal_handler_may_destroy_the_group_its_rank_waits_in():
    mine, other = run_ranks(_calling, 2, "destroy", backend="torchtp", fresh=True)
    assert mine == "no longer"
    assert "rank 0 shut the group down in a signal handler" in other


def _another_thread():
    """Handlers are the main thread's: a wait of another is not disturbed."""
    store, group, total, errors = dist.distributed_c10d._get_default_store(), dist.new_group(), torch.ones(1), []
    if dist.get_rank() == 0:
        done = threading.Event()

        def call():
            errors.append(_error_of(lambda: dist.all_reduce(total, group=group)))
            done.set()

        thread = threading.Thread(target=call)
        thread.start()
        with ticking(raise_impatience), pytest.raises(Impatient):
            done.wait()
        store.set("raised beside a thread", "yes")
        thread.join()
    else:
        store.wait(["raised beside a thread"])
        errors.append(_error_of(lambda: dist.all_reduce(total, group=group)))
    dist.destroy_process_group(group)
    return errors, total.item()


def test_signals_of_a_program_whose_other_thread_waits():
    assert run_ranks(_another_thread, 2, backend="torchtp", fresh=True) == [([None], 2)] * 2


_STARTS = """
import os, signal, sys, threading
import torch, torch.distributed as dist
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests in the background may have it ignored
rank = int(sys.argv[1])
dist.init_process_group("torchtp", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    sys.stdin.read()
    dist.barrier()
for _ in range(50):
    dist.all_reduce(torch.ones(1000), async_op=True)  # still queued when the program ends
"""
_CTRL_C = """
timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True
timer.start()
dist.all_reduce(torch.ones(4))
"""
_RAISES = "raise ValueError('mine')"
_RAISES_AND_DESTROYS = """
try:
    raise ValueError('mine')
finally:
    dist.destroy_process_group()
"""


def _ends(tmp_path, ending):
    """What two ranks, of which the second comes when the first has ended, return and say."""
    command = [sys.executable, "-W", "ignore", "-c", f"import torchtp\n{_STARTS}{ending}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        _, mine = started[0].communicate(timeout=120)
        _, other = started[1].communicate(timeout=120)
    finally:
        for process in started:
            process.kill()
    return started[0].returncode, mine, other


def test_ctrl_c_ends_a_rank_with_calls_under_way_as_it_ends_any_program(tmp_path):
    code, mine, other = _ends(tmp_path, _CTRL_C)
    assert code in (-signal.SIGINT, 130), (code, mine)
    assert mine.rstrip().endswith("KeyboardInterrupt"), mine
    # The signal may come before the wait: then the program ends by the error that Python raises itself.
    ends = (
        "was interrupted by a signal (KeyboardInterrupt)",
        "ended by an error (KeyboardInterrupt) with calls under way",
    )
    assert any(f"rank 0 {end}" in other for end in ends), other


@pytest.mark.parametrize("ending", [_RAISES, _RAISES_AND_DESTROYS], ids=["raises", "destroys"])
def test_a_rank_that_ends_by_an_error_waits_for_no_calls_under_way(tmp_path, ending):
    code, mine, other = _ends(tmp_path, ending)
    assert code == 1 and mine.rstrip().endswith("ValueError: mine"), (code, mine)
    assert "rank 0 ended by an error (ValueError: mine) with calls under way" in other


def _destroyed_at_the_end_of_a_loop():
    summed = [torch.ones(1000) for _ in range(20)]
    batches = iter(summed)
    try:
        while True:
            dist.all_reduce(next(batches), async_op=True)
    except StopIteration:
        dist.destroy_process_group()
    return all(each.eq(2).all() for each in summed)


def test_a_group_that_is_destroyed_at_the_end_of_a_loop_finishes_what_is_queued():
    assert run_ranks(_destroyed_at_the_end_of_a_loop, 2, backend="torchtp") == [True, True]
