"""Messages and halos in the traces: which of them found no partner, and which ranks are missing from an exchange."""

import pytest
import torch
import torch.distributed as dist
from test_trace import _call, _trace

import torchtp
from torchtp import _C, cli
from torchtp.observe import parting
from torchtp.testing import run_ranks


def _part(folder, prefix, name):
    return next(one for one in parting.read(folder.glob(f"{prefix}.rank*.jsonl")) if one.group == name)


def _unsent(folder):
    group = dist.new_group(backend="torchtp")
    rank, tensor = dist.get_rank(), torch.ones(4)
    if rank == 2:
        dist.send(tensor, 0, group, 3)
    work = None
    if rank == 0:
        dist.recv(torch.empty(4), 2, group, 3)
        work = dist.irecv(torch.empty(4), 2, group, 7)
    dist.barrier(group)
    torchtp.trace.dump(f"{folder}/run")
    dist.barrier(group)
    if rank == 2:
        dist.send(tensor, 0, group, 7)
    if work:
        work.wait()
    dist.barrier(group)
    torchtp.trace.dump(f"{folder}/later")
    return group.group_name


def test_a_receive_of_what_was_never_sent_is_told_with_the_rank_that_did_not_send(tmp_path, capsys):
    name = run_ranks(_unsent, 3, str(tmp_path), backend="torchtp")[0]
    parted = _part(tmp_path, "run", name)
    assert (parted.sequence, parted.halo, len(parted.unmatched)) == (None, None, 1)
    assert cli.main(["trace", *map(str, tmp_path.glob("run.rank*.jsonl"))]) == 1
    text = capsys.readouterr().out
    assert "messages without a partner:" in text
    assert "rank 0: recv(Float, 4 elements, tag 7) from rank 2, running for " in text
    assert ": rank 2 has not sent it; its last send was send(Float, 4 elements, tag 3) to rank 0, done" in text
    assert not _part(tmp_path, "later", name).is_found


def _many(folder):
    """More messages than are kept, of two tags that overtake each other."""
    group = dist.new_group(backend="torchtp")
    rank, tensor = dist.get_rank(), torch.ones(4)
    for _ in range(1200):
        for tag in (1, 2):
            dist.send(tensor, 1, group, tag) if rank == 0 else dist.recv(tensor, 0, group, 3 - tag)
    work = dist.irecv(tensor, 0, group, 2) if rank == 1 else None
    dist.barrier(group)
    torchtp.trace.dump(f"{folder}/many")
    dist.barrier(group)
    work.wait() if work else dist.send(tensor, 1, group, 2)
    return group.group_name


def test_the_last_2000_messages_tell_what_has_been_sent(tmp_path):
    parted = _part(tmp_path, "many", run_ranks(_many, 2, str(tmp_path), backend="torchtp")[0])
    assert [len(trace.messages) for trace in parted.ranks.values()] == [2000, 2000]
    assert len(parted.unmatched) == 1 and "tag 2) from rank 0, running" in parted.unmatched[0]


def _halos(folder):
    group = dist.new_group(backend="torchtp")
    exchange = _C.exchange_of(group.group_name, "cpu")
    rank = dist.get_rank()

    def start():
        return exchange.start([(1 - rank, 0, b"x" * 9)], [(1 - rank, 9)])

    exchange.finish(start())
    ticket = start() if rank == 0 else None
    dist.barrier(group)
    torchtp.trace.dump(f"{folder}/halos")
    dist.barrier(group)
    exchange.finish(ticket or start())
    dist.barrier(group)
    torchtp.trace.dump(f"{folder}/later")
    return group.group_name


def test_a_rank_that_is_missing_from_an_exchange_of_halos_is_told(tmp_path):
    name = run_ranks(_halos, 2, str(tmp_path), backend="torchtp")[0]
    parted = _part(tmp_path, "halos", name)
    assert (parted.sequence, parted.halo) == (None, 2)
    text = parting.told(parted)
    assert "they part at exchange of halos #2: not every rank has come through it" in text
    assert "rank 0: halo(9 bytes), queued for " in text
    assert "rank 1: has not called it; the last was #1 halo(9 bytes), done" in text
    assert not _part(tmp_path, "later", name).is_found


def _message(op, peer, state="running", **changed):
    changed = {"tag": 0, "number": -1 if state == "running" else 1, "kind": "message", "sequence": 0} | changed
    return _call(changed.pop("sequence"), state, op=op, reduce_op="", peer=peer, **changed)


@pytest.mark.parametrize(
    ("zero", "one", "expected"),
    [
        ([_message("recv", 1)], [_message("send", 0, "done")], []),  # on its way
        ([_message("recv", 1)], [_message("send", 0)], []),
        ([_message("recv", -1)], [_message("send", 0)], []),
        ([_message("recv", -1)], [], ["rank 0: recv(Float, 4 elements, tag 0) from any rank, running for 9.0 s: rank 1 has sent it nothing"]),
        ([_message("recv", 1)] * 2, [_message("send", 0)], ["rank 0: recv"]),
        ([_message("recv", 1, tag=4)], [_message("send", 0, "done", tag=5)], ["tag 5) to rank 0, done"]),
        ([], [_message("send", 0)], ["rank 1: send(Float, 4 elements, tag 0) to rank 0, running for 9.0 s: rank 0 has asked it for nothing"]),
        ([], [_message("send", 0, "done")], []),  # nobody waits
        ([_message("recv", 1, tag=4)], [_message("send", 0, tag=5)], ["rank 1 has not sent it", "rank 0 has not asked for it; its last recv was recv(Float, 4 elements, tag 4)"]),
        ([_message("recv", 1, "failed")], [_message("send", 0, "failed", bytes=20)], ["rank 1 sent 20 bytes", "rank 0 asked for 16 bytes"]),
        # Got once, asked for twice, sent once: with numbers, and between hosts without.
        ([_message("recv", 1, "done"), _message("recv", 1)], [_message("send", 0, "done")], ["has not sent it"]),
        ([_message("recv", 1, "done", number=-1), _message("recv", 1)], [_message("send", 0, "done", number=-1)], ["has not sent it"]),
        ([_message("recv", 1, "done", number=-1), _message("recv", 1)], [_message("send", 0, "done", number=-1)] * 2, []),
    ],
)  # fmt: skip
def test_messages_are_held_against_those_of_the_other_side(tmp_path, zero, one, expected):
    for rank, calls in enumerate((zero, one)):
        (tmp_path / f"{rank}").write_text(_trace(rank, [_call(0), *calls]))
    found = parting.read([tmp_path / "0", tmp_path / "1"])[0].unmatched
    assert len(found) == len(expected), found
    for line, part in zip(found, expected, strict=True):
        assert part in line


def test_a_rank_without_a_trace_is_not_accused(tmp_path):
    (tmp_path / "0").write_text(_trace(0, [_message("recv", 1), _message("recv", -1)]))
    parted = parting.read([tmp_path / "0"])[0]
    assert (parted.absent, parted.unmatched) == ([1], [])
