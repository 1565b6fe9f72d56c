"""The last calls of each rank, written down when something goes wrong, and where the ranks part."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchtp
from torchtp import cli, trace
from torchtp.observe import parting, timeline
from torchtp.testing import run_ranks


def _mismatch(folder):
    torchtp.trace.write_to(f"{folder}/run", [])
    group = dist.new_group(backend="torchtp")
    dist.barrier(group)
    tensor = torch.ones(10)
    try:
        if dist.get_rank() == 1:
            dist.broadcast(tensor, 0, group=group)
        else:
            dist.all_reduce(tensor, group=group)
    except dist.DistBackendError:
        return group.group_name
    finally:
        torchtp.trace.write_to("")
    raise AssertionError("the mismatch was not seen")


def test_ranks_that_call_different_things_are_told_apart(tmp_path, capsys):
    name = run_ranks(_mismatch, 3, str(tmp_path), backend="torchtp")[0]
    files = sorted(map(str, tmp_path.glob("run.rank*.jsonl")))
    assert [Path(file).name for file in files] == [f"run.rank{rank}.jsonl" for rank in range(3)]
    parted = next(one for one in parting.read(files) if one.group == name)
    assert (parted.sequence, parted.differs, parted.absent) == (1, True, [])
    assert cli.main(["trace", *files]) == 1
    text = capsys.readouterr().out
    assert "they part at call #1: they do not call the same" in text
    assert "ranks 0, 2: allreduce(SUM, Float, 10 elements), failed" in text
    assert "rank 1: broadcast(Float, 10 elements, root 0), failed" in text
    assert "ranks disagree on what to do" in text


def _agreeing(folder):
    group = dist.new_group(backend="torchtp")
    for _ in range(2500):  # more than are kept
        dist.barrier(group)
    file = torchtp.trace.dump(f"{folder}/calm")
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return group.group_name, sum(line.get("op") == "barrier" and line["group"] == group.group_name for line in lines)


def test_the_last_2000_calls_are_kept_and_agree(tmp_path):
    results = run_ranks(_agreeing, 2, str(tmp_path), backend="torchtp")
    assert [kept for _, kept in results] == [2000, 2000]
    parted = next(one for one in parting.read(tmp_path.glob("calm.rank*.jsonl")) if one.group == results[0][0])
    assert parted.sequence is None
    assert "all agree" in parting.told(parted)


PROGRAM = """
import os, sys
import torch, torch.distributed as dist, torchtp

rank = int(sys.argv[1])
dist.init_process_group("torchtp", rank=rank, world_size=2, store=dist.FileStore(sys.argv[2], 2))
dist.barrier()
work = dist.all_reduce(torch.ones(7), async_op=True) if rank == 0 else None
print("ready", flush=True)
if work:
    work.wait()
sys.stdin.read()
"""


def test_a_signal_writes_what_a_rank_waits_for(tmp_path):
    environment = os.environ | {"TORCHTP_TRACE": str(tmp_path / "killed")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        ranks[1].send_signal(signal.SIGTERM)
        assert ranks[1].wait(30) == -signal.SIGTERM
        ranks[0].send_signal(signal.SIGTERM)
        ranks[0].wait(30)
        parted = parting.read(tmp_path.glob("killed.rank*.jsonl"))[0]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert (parted.sequence, parted.differs) == (1, False)
    text = parting.told(parted)
    assert "rank 0: allreduce(SUM, Float, 7 elements)" in text
    assert "rank 1: has not called it; the last was #0 barrier(), done" in text


TWO_SIGNALS = """
import signal, sys
import torchtp.trace

signal.signal(signal.SIGUSR1, lambda *_: None)
torchtp.trace.write_to(sys.argv[1], (signal.SIGTERM, signal.SIGUSR1))
print("ready", flush=True)
while True:
    sys.stdin.read(1)
"""


def test_of_two_signals_at_once_none_is_lost(tmp_path):
    command = [sys.executable, "-c", TWO_SIGNALS, str(tmp_path / "of")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT):
            process.send_signal(number)
        try:
            assert process.wait(30) == -signal.SIGTERM
        finally:
            process.kill()


def _trace(rank, calls, size=2, first=0):
    """What `rank` of a group writes that has the global ranks from `first` on."""
    head = {"torchtp_trace": 1, "global_rank": first + rank, "pid": 1, "reason": "test", "now_ns": 9_000_000_000}
    members = list(range(first, first + size))
    group = {"group": "g", "rank": rank, "size": size, "global_ranks": members, "error": ""}
    return "".join(json.dumps(line) + "\n" for line in [head, group, *calls])


def _call(sequence, state="done", **changed):
    call = {
        "group": "g", "kind": "collective", "sequence": sequence, "op": "allreduce", "reduce_op": "SUM", "dtype": "Float", "elements": 4,
        "bytes": 16, "root": -1, "async": False, "state": state, "called_ns": 0, "started_ns": 1_000_000_000,
        "ended_ns": 0, "waited_ns": 0, "last_rank": -1,
    }  # fmt: skip
    return call | changed


def test_who_is_missing_is_named(tmp_path, capsys):
    for rank, calls in enumerate([[_call(0), _call(1), _call(2, "running")], [_call(0), _call(1)]]):
        (tmp_path / f"{rank}").write_text(_trace(rank, calls, size=3))
    assert cli.main(["trace", str(tmp_path / "0"), str(tmp_path / "1")]) == 1
    text = capsys.readouterr().out
    assert "no trace of rank 2" in text
    assert "rank 0: allreduce(SUM, Float, 4 elements), running for 8.0 s" in text
    assert "rank 1: has not called it; the last was #1 allreduce(SUM, Float, 4 elements), done" in text


def test_ranks_are_told_by_their_number_in_the_job(tmp_path, capsys):
    """As in the files' names, not by that in the group."""
    send = _call(0, "running", op="send", kind="message", peer=0, tag=7, number=1)
    calls = [[_call(0), _call(1, op="broadcast", root=1)], [_call(0), send]]
    for rank, of_rank in enumerate(calls):
        (tmp_path / f"{rank}").write_text(_trace(rank, of_rank, size=3, first=4))
    assert cli.main(["trace", str(tmp_path / "0"), str(tmp_path / "1")]) == 1
    text = capsys.readouterr().out
    assert "group 'g', 3 ranks: ranks 4, 5, 6" in text
    assert "no trace of rank 6: pass their files too (PATH.rank6.jsonl)" in text
    assert "rank 4: broadcast(SUM, Float, 4 elements, root 5), done" in text
    assert "rank 5: has not called it" in text
    assert (
        "rank 5: send(Float, 4 elements, tag 7) to rank 4, running for 9.0 s: rank 4 has asked it for nothing" in text
    )


def test_ranks_whose_files_are_missing_do_not_agree(tmp_path, capsys):
    for rank in range(3):
        (tmp_path / f"{rank}").write_text(_trace(rank, [_call(0), _call(1)], size=4))
    assert cli.main(["trace", str(tmp_path / "1")]) == 1
    text = capsys.readouterr().out
    assert "no trace of ranks 0, 2, 3" in text and "agree" not in text
    assert "rank 1: 2 calls, the last is done; there is no other rank to compare with" in text
    assert cli.main(["trace", *(str(tmp_path / f"{rank}") for rank in range(3))]) == 1
    assert "ranks 0, 1, 2 agree: 2 calls" in capsys.readouterr().out


def test_a_rank_that_has_left_a_group_is_not_missing(tmp_path, capsys):
    (tmp_path / "0").write_text(_trace(0, [_call(0)]))
    (tmp_path / "1").write_text(_trace(1, [_call(0)]).replace('"g"', '"other"'))
    files = [str(tmp_path / "0"), str(tmp_path / "1")]
    assert cli.main(["trace", *files]) == 0
    assert "not in the file of rank 1: the group was left there" in capsys.readouterr().out


def test_a_rank_may_see_its_own_share_only(tmp_path):
    for rank, elements in enumerate((8, 4)):
        (tmp_path / f"{rank}").write_text(_trace(rank, [_call(0, op="gather", elements=elements)]))
    assert parting.read([tmp_path / "0", tmp_path / "1"])[0].sequence is None


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b"no JSON\n", b'{"torchtp_trace": 2}\n', b"\x80\xff\0"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, data, capsys):
    (tmp_path / "file").write_bytes(data)
    assert cli.main(["trace", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} is not a trace of torchtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"elements": None}, "'elements' is a whole number of 64 bits, but it is None"),
        ({"called_ns": 1.5}, "'called_ns' is a whole number"),
        ({"ended_ns": 10**400}, "'ended_ns' is a whole number"),
        ({"sequence": [1]}, "'sequence' is a whole number"),
        ({"state": {}}, "'state' is a text, but it is {}"),
        ({"op": "\ud800"}, "surrogates not allowed"),
        ({"root": 2}, "'root' is a rank of a group of 2, but it is 2"),
        ({"last_rank": -2}, "'last_rank' is a rank"),
        ({"kind": "message"}, "it has no 'tag'"),
    ],
)
@pytest.mark.parametrize("command", ["trace", "timeline"])
def test_a_line_that_is_none_is_named(tmp_path, change, text, command, capsys):
    file = tmp_path / "file"
    file.write_text(_trace(0, [_call(0), _call(1) | change]))
    more = ["--out", str(tmp_path / "out")] if command == "timeline" else []
    assert cli.main([command, str(file), *more]) == 2
    error = capsys.readouterr().err
    assert f"{file} is not a trace of torchtp: line 4: " in error and text in error


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ('{"kind": "coll', "Unterminated string"),  # cut off as it was written
        ("[" * 100_000, "nested too deeply"),
        ("7", "a line is an object"),
        ('{"global_ranks": 3}', "'global_ranks' is a list"),
        ('{"global_ranks": [0], "group": "g", "rank": 0, "size": 2, "error": ""}', "rank 0 of 2 does not fit 1"),
    ],
)
def test_a_last_line_that_is_none_is_named(tmp_path, end, text, capsys):
    file = tmp_path / "file"
    file.write_text(_trace(0, [_call(0)]) + end)
    assert cli.main(["trace", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file} is not a trace of torchtp: line 4: " in error and text in error


def test_a_path_need_not_be_text(tmp_path):
    place = os.fsdecode(bytes(tmp_path) + b"/\xff")
    trace.write_to(place, signals=())
    trace.write_to("")
    assert trace.dump(place) == ""  # this process has made no group


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, 0, 999])
def test_signals_that_can_not_be_caught_are_refused(number):
    with pytest.raises(ValueError, match=f"but {int(number)} is SIGKILL, SIGSTOP or none"):
        torchtp.trace.write_to("run", (signal.SIGTERM, number))


def _forks(folder):
    """A child of a process whose signals are watched; how it ended by one for which the program had a handler."""
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    trace.write_to(folder / "of", [signal.SIGUSR1])
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun, b".")
        while True:
            pass
    os.read(ready, 1)
    os.kill(child, signal.SIGUSR1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_the_handlers_of_the_program(tmp_path):
    assert run_ranks(_forks, 1, tmp_path, backend="torchtp", fresh=True) == [7]


def _unwritable(folder):
    told = Path(folder) / f"told{dist.get_rank()}"
    kept = os.dup(2)
    with told.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        written = torchtp.trace.dump(f"{folder}/nowhere/run")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    return written, told.read_text()


def test_a_trace_that_can_not_be_written_says_where_and_why(tmp_path):
    for rank, (written, told) in enumerate(run_ranks(_unwritable, 2, str(tmp_path), backend="torchtp")):
        assert written == ""
        assert f"cannot write {tmp_path}/nowhere/run.rank{rank}.jsonl: No such file or directory" in told


def _drawn(folder, *traces):
    """The spans of a timeline: rank, name, start and end in us, by "X" events and pairs of "b" and "e"."""
    files = []
    for rank, calls in enumerate(traces):
        files.append(folder / f"{rank}")
        files[-1].write_text(_trace(rank, calls, size=len(traces)))
    spans, begun = [], {}
    for event in timeline.read(files)["traceEvents"]:
        if event["ph"] == "X":
            spans.append((event["pid"], event["name"], event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            begun[event["id"]] = event
        elif event["ph"] == "e":
            first = begun.pop(event["id"])
            spans.append((first["pid"], first["name"], first["ts"], event["ts"]))
    assert not begun
    return spans


def test_a_timeline_shows_calls_waiting_and_messages(tmp_path):
    waits = _call(0, called_ns=1_000_000, started_ns=2_000_000, ended_ns=9_000_000, waited_ns=6_000_000, last_rank=1)
    came = _call(0, called_ns=8_000_000, started_ns=8_000_000, ended_ns=9_000_000, last_rank=1)
    sends = _call(
        0,
        op="send",
        kind="message",
        called_ns=3_000_000,
        started_ns=3_000_000,
        ended_ns=4_000_000,
        peer=1,
        tag=0,
        number=1,
    )
    runs = _call(1, "running", called_ns=9_500_000, started_ns=9_600_000)
    assert _drawn(tmp_path, [waits, sends, runs], [came]) == [
        (0, "allreduce", 1000, 8000),
        (0, "waits for rank 1", 1000, 7000),
        (0, "allreduce", 8600, 8_999_000),
        (0, "send to rank 1", 2000, 3000),
        (1, "allreduce", 7000, 8000),
    ]


def test_clocks_of_other_hosts_are_set_by_common_calls(tmp_path):
    hour = 3_600_000_000_000
    calls = [_call(n, called_ns=n * 10_000, started_ns=n * 10_000, ended_ns=n * 10_000 + 5_000) for n in range(3)]
    later = [call | {name: call[name] + hour for name in ("called_ns", "started_ns", "ended_ns")} for call in calls]
    spans = _drawn(tmp_path, calls, later)
    assert [span[1:] for span in spans if span[0] == 0] == [span[1:] for span in spans if span[0] == 1]


def test_clocks_are_set_by_whatever_group_has_calls(tmp_path):
    hour = 3_600_000_000_000
    for rank in range(2):
        call = _call(0, called_ns=rank * hour, started_ns=rank * hour, ended_ns=rank * hour + 5_000)
        head, group, *calls = _trace(rank, [call]).splitlines()
        lines = [head, group.replace('"g"', '"idle"'), group, *calls]
        (tmp_path / f"{rank}").write_text("\n".join(lines))
    drawn = timeline.read([tmp_path / "0", tmp_path / "1"])
    starts = [event["ts"] for event in drawn["traceEvents"] if event["ph"] == "X"]
    assert starts == [0, 0]


def test_a_timeline_of_a_job_is_written(tmp_path, capsys):
    run_ranks(_agreeing, 2, str(tmp_path), backend="torchtp")
    out = tmp_path / "drawn.json"
    assert cli.main(["timeline", *map(str, sorted(tmp_path.glob("calm.rank*.jsonl"))), "--out", str(out)]) == 0
    assert f"{out}: 2 ranks, " in capsys.readouterr().out
    drawn = json.loads(out.read_text())["traceEvents"]
    assert {event["pid"] for event in drawn} == {0, 1}
    assert sum(event["name"] == "barrier" for event in drawn) >= 4000
    assert cli.main(["timeline", str(out)]) == 2
    assert "is not a trace of torchtp" in capsys.readouterr().err
