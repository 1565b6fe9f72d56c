"""What every exchange must do, run on each of them: shared memory, point-to-point calls of any group, threads."""

import random
import threading

import pytest
import torch.distributed as dist

from torchtp import _C
from torchtp.testing import run_ranks

KINDS = {
    "shared memory": ("torchtp", "auto"),
    "gloo's point to point": ("gloo", "auto"),
    "torchtp's point to point": ("torchtp", "point_to_point"),
    "threads": None,
    "memory of each other": ("torchtp", "peer_memory"),
    "staged on the host": ("gloo", "staged"),
    "grouped calls": ("gloo", "grouped"),
}


def _on_a_rank(body, kind, args):
    group = dist.new_group()
    _C.set_exchange(group.group_name, kind)
    try:
        return body(_C.exchange_of(group.group_name), dist.barrier, *args)
    finally:
        dist.barrier()
        dist.destroy_process_group(group)


def _on_threads(body, size, args):
    barrier = threading.Barrier(size, timeout=60)
    results = [None] * size
    errors = []

    def run(rank, exchange):
        try:
            results[rank] = body(exchange, barrier.wait, *args)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(_C.thread_exchanges(size, 60.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _run(kind, size, body, *args):
    if KINDS[kind] is None:
        return _on_threads(body, size, args)
    backend, choice = KINDS[kind]
    return run_ranks(_on_a_rank, size, body, choice, args, backend=backend)


def _content(step, source, to, num_bytes):
    return random.Random(f"{step} {source} {to}").randbytes(num_bytes)


def _layout(step, source, to):
    return (step * 7 + source * 3 + to) % 5


def _send(step, source, to, num_bytes):
    return to, _layout(step, source, to), _content(step, source, to, num_bytes)


def _everybody_to_everybody(exchange, barrier, largest, steps, seed):
    shared, own = random.Random(seed), random.Random(seed + 1 + exchange.rank)
    me, under_way = exchange.rank, []

    def finish_one():
        ticket, step, wanted = under_way.pop(own.randrange(len(under_way)))
        got = exchange.finish(ticket)
        for (peer, num_bytes), (layout, content, _) in zip(wanted, got, strict=True):
            assert content == _content(step, peer, me, num_bytes)
            assert num_bytes == 0 or layout == _layout(step, peer, me)
        written = sorted((at, peer) for (peer, _), (_, _, at) in zip(wanted, got, strict=True) if at >= 0)
        assert [peer for _, peer in written] == sorted(peer for peer, num_bytes in wanted if num_bytes > 0)

    for step in range(steps):
        sends, wanted = [], []
        for source in range(exchange.size):
            for to in range(exchange.size):
                num_bytes = shared.choice([0, shared.randrange(300), shared.randrange(largest)])
                if source == to or shared.random() < 0.2:
                    continue
                if source == me:
                    sends.append(_send(step, source, to, num_bytes))
                if to == me:
                    wanted.append((source, num_bytes))
        own.shuffle(wanted)
        under_way.append((exchange.start(sends, wanted), step, wanted))
        while len(under_way) > own.randrange(4):
            finish_one()
    while under_way:
        finish_one()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_any_sizes_arrive_whatever_the_order_of_finishing(kind, size):
    _run(kind, size, _everybody_to_everybody, 2000, 30, size)


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_arrive(kind):
    _run(kind, 3, _everybody_to_everybody, 3 << 20, 6, 7)


def _two_for_one_peer(exchange, barrier):
    me, peer = exchange.rank, 1 - exchange.rank
    sizes = [100, 0, 200]
    ticket = exchange.start([_send(i, me, peer, n) for i, n in enumerate(sizes)], [(peer, n) for n in sizes])
    got = [(content, at) for _, content, at in exchange.finish(ticket)]
    assert got == [(_content(0, peer, me, 100), 0), (b"", -1), (_content(2, peer, me, 200), 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_messages_for_one_peer_keep_their_order(kind):
    _run(kind, 2, _two_for_one_peer)


def _nobody_looks(exchange, barrier):
    if exchange.rank == 0:
        ticket = exchange.start([_send(1, 0, 1, 5000)], [])
        barrier()
        exchange.finish(ticket)
    else:
        ((_, content, _),) = exchange.finish(exchange.start([], [(0, 5000)]))
        assert content == _content(1, 0, 1, 5000)
        barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_alone_delivers(kind):
    _run(kind, 2, _nobody_looks)


def _finish_twice(exchange, barrier):
    ticket = exchange.start([], [])
    exchange.finish(ticket)
    with pytest.raises(RuntimeError, match=f"no exchange {ticket} is under way"):
        exchange.finish(ticket)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ticket_is_finished_once(kind):
    _run(kind, 2, _finish_twice)


def _sizes_differ(exchange, barrier, sent, expected):
    message = None
    if exchange.rank == 0:
        exchange.finish(exchange.start([_send(1, 0, 1, sent)], []))
    else:
        try:
            exchange.finish(exchange.start([], [(0, expected)]))
        except RuntimeError as error:
            message = str(error)
    return message


@pytest.mark.parametrize("sent, expected", [(100, 128), (128, 100)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grouped calls"])  # they carry no sizes
def test_sizes_that_differ_are_an_error_with_both_sides(kind, sent, expected):
    message = _run(kind, 2, _sizes_differ, sent, expected)[1]
    assert f"rank 1 expects {expected} bytes from rank 0" in message
    assert f"rank 0 sent {sent} bytes" in message
