"""Ranks of real process groups that are killed, stopped or slowed at a random microsecond of whatever they do.

`python tests/chaos.py [--hosts] [TRIALS [SEED]]`. Ranks are forked from this process, which has imported torch once. The survivors of
a kill must all raise, name the rank and the call, leave nothing behind and work on as a new group (or end by the error
alone); ranks that are only stopped or slowed must change nothing. With --hosts they are spread over two hosts: the ranks of another host
hear of the death, or name whom they lost. The same one floor down: tests/cpp/chaos_test.cpp.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import mmap
import os
import random
import re
import signal
import struct
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass

import chaos_phases
import torch
import torch.distributed as dist
from chaos_phases import sum_of, tensor_of
from forked import served_store, strike_myself

import torchtp  # noqa: F401 (registers the backend)
from torchtp.testing import namespaces, timeout_scale
from torchtp.testing.namespaces import enter_network

PHASES = ("rendezvous", *(body.__name__ for body in chaos_phases.PHASES), "destroy")
BLOWS = ("kill", "stop", "slow")
UNKNOWN = "not yet known"  # before its first words: nobody has a process to watch, the deadline tells
TIMEOUT = datetime.timedelta(seconds=300)
SHORT_TIMEOUT = datetime.timedelta(seconds=10)  # where a rank may die before it has said a word: nobody can know of it
HANG_SECONDS = 60.0  # of a trial; far more than any takes, far less than TIMEOUT
FIELDS = ("phase", "began", "ended", "blow", "raised")  # of the phase that is struck; times in nanoseconds, 0: not yet
RECORD = struct.Struct("=qqqqqi4000s")  # those, and an error with its length

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Trial:
    number: int
    size: int
    victim: int
    phase: int
    blow: str
    after_us: int
    hosted: bool  # rank 0 serves the store of the first group, as without torchrun
    uncaught: bool  # nobody catches the error
    places: tuple = ()  # the host of each rank, where there are several

    def __str__(self):
        store = ", rank 0 serves the store" if self.hosted else ""
        how = ", errors end the process" if self.uncaught else ""
        how += f", on hosts {self.places}" if self.places else ""
        return f"{self.blow} of rank {self.victim} of {self.size} {self.after_us} us into '{PHASES[self.phase]}'{store}{how}"


class Diary:
    """What the parent sees of the ranks, in memory that all of them map; and the port of the store of rank 0."""

    def __init__(self, size):
        self.memory = mmap.mmap(-1, 8 + size * RECORD.size)

    def _at(self, rank):
        return 8 + rank * RECORD.size

    def read(self, rank):
        """Phase, length of the struck phase in us, time of the blow and of the error, error."""
        phase, began, ended, blow_at, raised_at, length, error = RECORD.unpack_from(self.memory, self._at(rank))
        return phase, (ended - began) // 1000, blow_at, raised_at, error[:length].decode()

    def note(self, rank, field, value):
        struct.pack_into("=q", self.memory, self._at(rank) + 8 * FIELDS.index(field), value)

    def note_error(self, rank, text):
        text = text.encode()[:4000].decode(errors="ignore").encode()
        struct.pack_into("=i4000s", self.memory, self._at(rank) + 40, len(text), text)
        self.note(rank, "raised", time.monotonic_ns())

    @property
    def port(self):
        return struct.unpack_from("=q", self.memory)[0]

    @port.setter
    def port(self, value):
        struct.pack_into("=q", self.memory, 0, value)


def holdings(serves):
    """Descriptors, mappings of shared memory and threads of this process; a store that it serves has sockets of its own."""
    gc.collect()
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/maps") as maps:
        shared = [line.split(maxsplit=5)[-1].strip() for line in maps if "memfd" in line]
    descriptors = sorted(
        re.sub(r"\d+", "N", each) for each in descriptors if not (serves and each.startswith("socket"))
    )
    return descriptors, shared, len(os.listdir("/proc/self/task"))


def live(trial, rank, store, enter):
    """The phases that the trial needs; `enter` is told of each."""
    enter(0)
    timeout = SHORT_TIMEOUT * timeout_scale() if trial.phase == 0 and trial.blow == "kill" else TIMEOUT
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=trial.size, timeout=timeout)
    for phase, body in enumerate(chaos_phases.PHASES, 1):
        if trial.phase == phase or (trial.phase == 0 and phase == 1):
            enter(phase)
            body(rank, trial.size)
    enter(PHASES.index("destroy"))
    dist.destroy_process_group()
    enter(None)


class Stage:
    """Where trials take place: on this host, or on hosts that this process reaches from outside."""

    def __init__(self, over_hosts, end):
        self._network = end.enter_context(namespaces._network(2)) if over_hosts else None
        self.address = "127.0.0.1"
        if self._network is not None:
            self.address = "10.77.0.254"
            enter_network(self._network.bridge.path)
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def places(self, size, rng):
        """For each rank a host, none of them empty; nothing where there is one."""
        if self._network is None:
            return ()
        first = rng.randint(1, size - 1)
        return (0,) * first + (1,) * (size - first)

    def enter(self, trial, rank):
        if trial.places:
            enter_network(self._network.hosts[trial.places[rank]].path)

    def client(self, port):
        return dist.TCPStore(self.address, port, wait_for_workers=False)


def take_part(stage, trial, rank, port, diary):
    """A rank: lives, is struck or survives, leaves nothing behind and works on among the survivors."""
    stage.enter(trial, rank)
    _libc.prctl(1, signal.SIGKILL)  # ends with the parent
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    common = dist.PrefixStore(str(trial.number), stage.client(port))
    first, server = common, None
    if trial.hosted and rank == 0:
        first = server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        diary.port = server.port
    elif trial.hosted:
        while not diary.port:
            time.sleep(0.001)
        first = stage.client(diary.port)
    if trial.hosted:  # who connects to a store that dies just then is in c10d's hands
        common.set(f"connected {rank}", "")
        common.wait([f"connected {each}" for each in range(trial.size)])
    before = holdings(server)

    def enter(phase):
        now = time.monotonic_ns()
        if diary.read(rank)[0] == trial.phase:
            diary.note(rank, "ended", now)
        if phase is None:
            return
        diary.note(rank, "phase", phase)
        if phase != trial.phase:
            return
        diary.note(rank, "began", now)
        if rank == trial.victim and trial.blow in BLOWS:
            diary.note(rank, "blow", now + 1000 * trial.after_us)
            strike_myself(signal.SIGKILL if trial.blow == "kill" else signal.SIGSTOP, trial.after_us)

    try:
        live(trial, rank, first, enter)
    except dist.DistError as error:
        diary.note_error(rank, str(error))
        if trial.uncaught:
            sys.excepthook = lambda *_: None
            raise
    if dist.is_initialized():
        dist.destroy_process_group()
    after = holdings(server)
    assert after == before, f"left behind: {after}, before: {before}"
    if trial.blow != "kill" or rank == trial.victim or trial.uncaught:  # whose error ended it makes no new group
        return
    # Where making the group failed torch has counted it all the same, and would give the next one another name.
    dist.distributed_c10d._world.group_count = 0
    place, size = rank - (rank > trial.victim), trial.size - 1
    again = dist.PrefixStore("again", common)
    dist.init_process_group("torchtp", store=again, rank=place, world_size=size, timeout=TIMEOUT)
    tensor = tensor_of(place, 1000)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum_of(size, 1000))
    dist.destroy_process_group()
    after = holdings(server)
    assert after == before, f"left behind by the survivors: {after}, before: {before}"


class Ranks:
    """The processes of a trial. Only the parent goes on after `start`."""

    def __init__(self, stage, trial, port, diary):
        self.trial = trial
        self.children = {}
        for rank in range(trial.size):
            pid = os.fork()
            if pid == 0:
                take_part(stage, trial, rank, port, diary)
                os._exit(0)
            self.children[pid] = rank

    def reap(self, rng):
        """Wait for all, continue who was stopped; what went wrong, or nothing."""
        deadline = time.monotonic() + HANG_SECONDS * timeout_scale()
        blows_left, wrong = (4 if self.trial.blow == "slow" else 0), []
        while self.children:
            if time.monotonic() > deadline:
                return [*wrong, f"ranks {self._kill()} hung"]
            for pid in list(self.children):
                found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                if not found:
                    continue
                if os.WIFSTOPPED(status):
                    time.sleep(rng.random() * (0.003 if self.trial.blow == "slow" else 0.08))
                    os.kill(pid, signal.SIGCONT)
                    if blows_left > 0:
                        blows_left -= 1
                        time.sleep(rng.random() * 0.001)
                        os.kill(pid, signal.SIGSTOP)
                    continue
                rank = self.children.pop(pid)
                wrong += self._judge(rank, status)
            time.sleep(0.0005)
        return wrong

    def _judge(self, rank, status):
        if rank == self.trial.victim and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return []
        code = os.waitstatus_to_exitcode(status)
        return [] if code in ((0, 1) if self.trial.uncaught else (0,)) else [f"rank {rank} ended with status {code}"]

    def _kill(self):
        for pid in self.children:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)  # their stacks go to stderr
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return sorted(self.children.values())


def judge(trial, diary, spoke, latencies):
    """What is wrong with what the ranks wrote."""
    victim_phase, _, blow_at, _, _ = diary.read(trial.victim)
    killed = trial.blow == "kill" and blow_at != 0
    wrong, causes, num_raised = [], set(), 0
    for rank in range(trial.size):
        phase, _, _, raised_at, error = diary.read(rank)
        if rank == trial.victim:
            continue
        if not raised_at:
            # It had all that it needed from the victim: each phase checks its results.
            if killed and PHASES[phase] != "destroy":
                wrong.append(f"rank {rank} neither raised nor came through")
            continue
        num_raised += 1
        named = f"rank {trial.victim} died" in error
        if trial.hosted and "store that the ranks of a process group meet at failed" in error:
            # Whose first words are lost with it cannot be seen to have ended. A group that is made needs no store.
            named = victim_phase == 0
        elif trial.places and spoke:
            # Who loses the connection hears the cause from a rank of that host, if one is left who could tell.
            named = named or re.search(rf"lost the connection to rank {trial.victim}\b", error) is not None
            # Alone on its host and not yet connected, it could be missed by nobody before the deadline.
            alone = trial.places.count(trial.places[trial.victim]) == 1
            unseen = re.search(rf"rank {trial.victim} did not (come|go on)\b", error) is not None
            named = named or (victim_phase == 0 and alone and unseen)
        elif victim_phase == 0 and not spoke:
            named = named or f"rank {trial.victim} did not come to the creation" in error
        elif victim_phase > 0:
            named = named and " waited in " in error
            causes.add(error)
        if not named:
            wrong.append(f"rank {rank} does not name rank {trial.victim} and the call")
        is_unknown = re.search(r"did not (come to|go on with) the creation", error)
        what = UNKNOWN if is_unknown else PHASES[trial.phase]
        latencies[what].append((raised_at - blow_at) / 1e6)
    if num_raised and not killed:
        wrong.append("somebody raised")
    if len(causes) > 1:
        wrong.append("the errors differ")
    return wrong


def print_latencies(what, values):
    values = sorted(values)
    at = lambda share: values[int(share * (len(values) - 1))]  # noqa: E731
    times = f"median {at(0.5):.1f}, 99th percentile {at(0.99):.1f}, longest {at(1):.1f}"
    print(f"{what:14} {len(values):5} raised, ms after the kill: {times}")


def calm_lengths(stage, port):
    """How many microseconds each phase takes when nobody is struck."""
    lengths = []
    for phase in range(len(PHASES)):
        trial = Trial(-1 - phase, 3, 0, phase, "calm", 0, False, False, stage.places(3, random))
        diary = Diary(3)
        wrong = Ranks(stage, trial, port, diary).reap(random)
        if wrong:
            raise SystemExit(f"{trial}: {wrong}")
        lengths.append(diary.read(0)[1])
    return lengths


def pick(stage, rng, number, lengths):
    size = rng.randint(2, 4)
    phase = rng.randrange(len(PHASES))
    blow = "kill" if rng.random() < 0.6 else rng.choice(BLOWS[1:])
    after_us = int(rng.random() * 1.1 * lengths[phase])
    victim = rng.randrange(size)
    places = stage.places(size, rng)
    hosted = not places and rng.random() < 0.3
    return Trial(number, size, victim, phase, blow, after_us, hosted, rng.random() < 0.3, places)


def main(trials, seed, over_hosts):
    print(f"{trials} trials, seed {seed}", flush=True)
    rng, latencies, failed = random.Random(seed), defaultdict(list), 0
    with contextlib.ExitStack() as end:
        stage = Stage(over_hosts, end)
        _, port = end.enter_context(served_store(stage.address))
        looking = stage.client(port)
        lengths = calm_lengths(stage, port)
        for number in range(trials):
            trial = pick(stage, rng, number, lengths)
            diary = Diary(trial.size)
            wrong = Ranks(stage, trial, port, diary).reap(rng)
            # Its first word is still in the store, unless the store has gone with rank 0.
            spoke = not trial.hosted and looking.check([f"{number}/0//cpu//torchtp/{trial.size}/1/1/{trial.victim}"])
            wrong += judge(trial, diary, spoke, latencies)
            if not wrong:
                continue
            failed += 1
            print(f"{trial}: {'; '.join(wrong)}", flush=True)
            for rank in range(trial.size):
                phase, _, _, raised_at, error = diary.read(rank)
                print(f"  rank {rank} in '{PHASES[phase]}': {error if raised_at else 'raised nothing'}", flush=True)
    unknown = latencies.pop(UNKNOWN, [])
    for phase in PHASES:
        if latencies[phase]:
            print_latencies(phase, latencies[phase])
    seen = [value for values in latencies.values() for value in values]
    if seen:
        print_latencies("all", seen)
    if unknown:
        print_latencies(UNKNOWN, unknown)
    print(f"{failed} of {trials} trials failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    gc.freeze()  # ranks look for garbage of their own only
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("trials", nargs="?", type=int, default=20, help="how many (default 20)")
    arguments.add_argument("seed", nargs="?", type=int, help="the same trials again")
    arguments.add_argument("--hosts", action="store_true", help="ranks on two hosts, which are network namespaces")
    given = arguments.parse_args()
    sys.exit(main(given.trials, given.seed, given.hosts))
