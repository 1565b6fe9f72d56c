"""What goes wrong around a group (its store, its ranks while it is made, memory) is one clear error on all ranks."""

import contextlib
import datetime
import os
import resource
import select
import signal
import time

import pytest
import torch
import torch.distributed as dist
from address_space import address_space
from forked import forked, served_store
from preloading import broken
from stores import Store, at_call

from torchtp.testing import run_ranks

SOON = datetime.timedelta(seconds=4)  # a busy machine may keep a rank for seconds
LATE = datetime.timedelta(seconds=300)
WORDS = 9  # that each rank says to the others while a group is made


def client(port, *prefix):
    return dist.PrefixStore("/".join(map(str, prefix)), dist.TCPStore("127.0.0.1", port, wait_for_workers=False))


def make_group(rank, size, store, timeout):
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=size, timeout=timeout)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.tolist()


def _dies(rank, port, word):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    store = client(port, word)
    if rank == 1:
        store = Store(store, at_call(word, "set", die))
    return make_group(rank, 3, store, SOON if word == 1 else LATE)


def _deaths():
    with served_store() as (_, port):
        return [forked(3, _dies, port, word) for word in range(1, WORDS + 2)]


def test_a_rank_that_dies_before_any_of_its_words_is_named():
    (deaths,) = run_ranks(_deaths, 1, backend=None, timeout=120)
    first, *others, last = deaths
    for error in (first[0], first[2]):  # it never spoke: nobody can know that it is gone
        assert "rank 1 did not come to the creation of the process group within 4 s" in error
    for word, errors in enumerate(others, 2):
        for error in (errors[0], errors[2]):
            assert "rank 1 died (its process is gone) while the group was being made" in error, (word, error)
    assert last == [[3.0] * 3] * 3  # there is no such word


def _goes_before_another_group(rank, port, members, way):
    make_group(rank, 4, client(port, len(members)), LATE)
    if rank != 2:
        dist.new_group(members)
    elif way == "died":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        dist.destroy_process_group()


def _ends_before_another_group(members, way):
    with served_store() as (_, port):
        return forked(4, _goes_before_another_group, port, members, way)


@pytest.mark.parametrize("way", ["died", "left"])
@pytest.mark.parametrize("members", [[0, 1, 2, 3], [1, 2]], ids=str)
def test_a_rank_that_goes_before_another_group_is_made_is_named(members, way):
    (errors,) = run_ranks(_ends_before_another_group, 1, members, way, backend=None, timeout=120)
    for member in members:
        assert member == 2 or f"rank {members.index(2)} {way}" in errors[member], errors[member]


def only_make(rank, size, store):
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=size, timeout=LATE)
    return "made"


def at_last_get(store, size, then):
    return Store(store, at_call(WORDS * size, "get", then))


def _dies_with_all_but_its_last_answer(rank, port):
    store = client(port)
    if rank == 1:
        store = at_last_get(store, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return only_make(rank, 3, store)


def _death_over_the_last_answer():
    with served_store() as (_, port):
        return forked(3, _dies_with_all_but_its_last_answer, port)


def test_nobody_goes_on_with_a_group_while_a_rank_still_needs_the_store():
    ((first, _, last),) = run_ranks(_death_over_the_last_answer, 1, backend=None)
    assert first == last
    assert "rank 1 died (its process is gone) while " in first and "waited in the making of the group" in first


def make_at_rank_0(rank, meeting, store_of):
    """Only makes a group of three, whose rank 0 serves the store; the others ask `store_of(a client, rank 0's process)`."""
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("server", f"{server.port} {os.getpid()}")
        meeting.wait(["rank 1 is here", "rank 2 is here"])
        return only_make(rank, 3, dist.PrefixStore("", server))
    served_at, served_by = map(int, meeting.get("server").split())
    store = store_of(client(served_at), os.pidfd_open(served_by))
    meeting.set(f"rank {rank} is here", "")
    return only_make(rank, 3, store)


def _asks_a_lost_store(rank, port):
    """Rank 1 dies, rank 0 finds out and ends with the store that it serves, and then rank 2 asks that store."""

    def store_of(store, process):
        def then():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            select.select([process], [], [])

        return at_last_get(store, 3, then)

    return make_at_rank_0(rank, client(port), store_of)


def _store_lost_over_the_last_answer():
    with served_store() as (_, port):
        return forked(3, _asks_a_lost_store, port)


def test_a_store_that_is_lost_over_the_last_answer_is_not_the_error():
    ((first, _, last),) = run_ranks(_store_lost_over_the_last_answer, 1, backend=None)
    assert first == last
    assert "rank 1 died (its process is gone) while rank 0 waited in the making of the group" in first


def _hears_late(rank, port, wrong):
    """The answers of rank 0's store come late to rank 1, as over a long line; so does rank 0's end."""
    if rank in wrong:
        os.environ["TORCHTP_STALL_SECONDS"] = "soon"

    def store_of(store, process):
        return store if rank != 1 else Store(store, lambda called: select.select([process], [], [], 0.1))

    return make_at_rank_0(rank, client(port, *wrong), store_of)


def _mistakes_heard_late():
    with served_store() as (_, port):
        return [forked(3, _hears_late, port, wrong) for wrong in ([0, 1, 2], [0], [1])]


def test_a_mistake_is_heard_by_all_before_rank_0_ends_with_the_store():
    (cases,) = run_ranks(_mistakes_heard_late, 1, backend=None, timeout=120)
    for errors in cases:
        assert len(set(errors)) == 1, errors
        assert "TORCHTP_STALL_SECONDS must be a positive number of seconds, not 'soon'" in errors[0]


class Last(Store):
    """Its process is gone with the number-th word that it has said."""

    def __init__(self, inner, number):
        super().__init__(inner, lambda called: None)
        self.left = number

    def set(self, key, value):
        super().set(key, value)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _says_and_dies(rank, port, word, victim):
    store = client(port, word)
    return make_group(rank, 3, Last(store, word) if rank == victim else store, LATE)


def _deaths_after_words(victim):
    with served_store() as (_, port):
        return [forked(3, _says_and_dies, port, word, victim, seconds=20) for word in range(1, WORDS + 1)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_after_any_of_its_words_is_named(victim):
    (deaths,) = run_ranks(_deaths_after_words, 1, victim, backend=None, timeout=120)
    for word, errors in enumerate(deaths, 1):
        for error in errors[:victim] + errors[victim + 1 :]:
            assert f"rank {victim} died (its process is gone) while " in error, (word, error)


def _raises(rank, port, kind, number):
    def fail():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no descriptor is left to look at the others with
        raise RuntimeError("it is broken")

    store = client(port, kind, number)
    return make_group(rank, 3, Store(store, at_call(number, kind, fail)) if rank == 1 else store, LATE)


def _broken_stores():
    with served_store() as (_, port):
        return [forked(3, _raises, port, *call) for call in (("set", 2), ("get", 5), ("get", 16), ("check", 4))]


def test_a_store_that_fails_for_one_rank_is_the_error_of_all():
    (cases,) = run_ranks(_broken_stores, 1, backend=None, timeout=120)
    for errors in cases:
        for error in errors:
            assert "the store that the ranks of a process group meet at failed: " in error, errors
            assert "it is broken" in error
            assert "has ended" not in error


def _loses_its_store(rank, port, server, number):
    """The last rank never comes, and the others' first question strikes the store: no deadline can pass before."""
    if rank == 2:
        return None
    store = client(port)

    def strike():
        store.wait(["rank 0 is here", "rank 1 is here"])
        os.kill(server, number)

    store.set(f"rank {rank} is here", "")
    return make_group(rank, 3, Store(store, at_call(1, "check", strike)), SOON if number == signal.SIGSTOP else LATE)


def _lost_stores():
    cases = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with served_store() as (server, port):
            cases.append(forked(3, _loses_its_store, port, server, number))
    return cases


def test_a_store_that_has_died_or_does_not_answer_is_named():
    ((dead, stopped),) = run_ranks(_lost_stores, 1, backend=None, timeout=120)
    for error in dead[:2]:
        assert "the store that the ranks of a process group meet at failed: " in error
    for error in stopped[:2]:
        assert "meet at has not answered for 4 s: is the process that serves it" in error


def _without_address_space(rank, port):
    with address_space(256 << 20) if rank == 1 else contextlib.nullcontext():
        return make_group(rank, 3, client(port), LATE)


def _narrow():
    with served_store() as (_, port):
        return forked(3, _without_address_space, port)


def test_a_rank_without_address_space_is_the_error_of_all():
    (errors,) = run_ranks(_narrow, 1, backend=None)
    assert len(set(errors)) == 1, errors
    for part in ("rank 1 cannot take part", "cannot map ", "TORCHTP_HEAP_BYTES", "Cannot allocate memory"):
        assert part in errors[0]


def _many_groups():
    with address_space(4 << 30):
        groups = [dist.new_group() for _ in range(20)]
        total = torch.ones(1000)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.unique().tolist()


def test_groups_share_the_address_space_that_is_left():
    assert run_ranks(_many_groups, 2, backend="torchtp", fresh=True) == [[float(2**20)]] * 2


def _messages(rank, group):
    sending = dist.isend(torch.ones(100_000), (rank + 1) % 3, group=group)
    dist.recv(torch.empty(100_000), (rank - 1) % 3, group=group)
    sending.wait()
    dist.barrier(group)  # not all need rank 0's message


def _pull(rank, group):
    begins, ends = [-1, 1, 3], [3, 5, 7]
    torch.ops.torchtp.pull(torch.ones(1, 1, 2, 9), 2, 6, begins, ends, group.group_name)
    dist.barrier(group)


def _new_group(rank, group):
    dist.new_group()


def _without_memory(library, call):
    rank, group = dist.get_rank(), dist.new_group(timeout=LATE)
    backend = group._get_backend(torch.device("cpu"))
    with broken(library, "no_memory") if rank == 0 else contextlib.nullcontext():
        lent = backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu")).fill_(rank)
        dist.all_reduce(lent, group=group)  # from ordinary memory
        assert (lent == 3).all()
        with pytest.raises(dist.DistBackendError) as raised:
            call(rank, group)
        return str(raised.value)


@pytest.mark.parametrize("call", [_messages, _pull, _new_group])
def test_memory_that_ends_is_the_error_of_all(preloaded, call):
    errors = run_ranks(_without_memory, 3, preloaded, call, backend="torchtp", fresh=True)
    for error in errors:
        assert "no memory for " in error and "bytes of shared memory: Cannot allocate memory" in error, errors
        assert "is the machine or the container out of memory?" in error


def _under_a_jumping_clock(library):
    with broken(library, "jump_seconds", 86400):
        _wait_in_all_ways()


def _wait_in_all_ways():
    """Waits that spin, sleep and end by their timeout."""
    rank = dist.get_rank()
    first = time.time()
    assert abs(time.time() - first) > 3600
    group = dist.new_group(timeout=SOON)
    for numel in (3, 300_000):
        tensor = torch.ones(numel)
        for work in [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(3)]:
            work.wait()
        assert (tensor == 8).all()
        sending = dist.isend(tensor, 1 - rank, group=group)
        dist.recv(torch.empty(numel), 1 - rank, group=group)
        sending.wait()
    if rank == 1:
        dist.barrier()
    with pytest.raises(dist.DistBackendError, match="rank 1 has not arrived after 4 s"):
        dist.barrier(group)
    if rank == 0:
        dist.barrier()


def test_the_wall_clock_may_jump(preloaded):
    run_ranks(_under_a_jumping_clock, 2, preloaded, backend="torchtp", fresh=True)
