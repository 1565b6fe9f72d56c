"""Ranks forked from this process: cheap, so that a test can lose one in each of its cases.

The process that forks has no thread: a lock that another thread holds just then stays held in the child for ever. So the
store that the ranks meet at, which is served by a thread, has a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import selectors
import signal
import struct
import time
import traceback

import torch.distributed as dist

from torchtp.testing import timeout_scale

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def served_store(address="127.0.0.1"):
    """The pid and the port of a process that serves a store, as torchrun's does, until the block ends."""
    owner = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _end_with_parent()
            store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            os.close(writing)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with open(reading) as pipe:
            port = int(pipe.read())
        yield pid, port
    finally:
        if os.getpid() == owner:  # an error of a rank forked in the block passes here too
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def forked(size, body, *args, seconds=60.0):
    """What `body(rank, *args)` returned on each rank, or the text of its DistError; None from a rank that was killed.

    Raises TimeoutError if a rank neither answers nor ends, and AssertionError with the traceback of any other error.
    """
    pids, pipes, answers = [], {}, [b""] * size
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, writing, body, args)
        os.close(writing)
        pids.append(pid)
        pipes[reading] = rank
    deadline = time.monotonic() + seconds * timeout_scale()
    try:
        with selectors.DefaultSelector() as selector:
            for pipe in pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(pipes[key] for key in selector.get_map())} have not answered")
                for key, _ in ready:
                    if part := os.read(key.fd, 1 << 16):
                        answers[pipes[key.fd]] += part
                    else:
                        selector.unregister(key.fd)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in pipes:
            os.close(pipe)
    results = [pickle.loads(answer) if answer else (True, None) for answer in answers]
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def strike_myself(number, after_us):
    """The kernel delivers the signal, wherever this process then is."""
    event = ctypes.create_string_buffer(struct.pack("=Qii", 0, number, 0), 64)
    timer = ctypes.c_void_p()
    assert _libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0
    seconds, microseconds = divmod(after_us, 1_000_000)
    when = struct.pack("=qqqq", 0, 0, seconds, 1000 * microseconds + 1)
    assert _libc.timer_settime(timer, 0, when, None) == 0


def _end_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_rank(rank, writing, body, args):
    _end_with_parent()
    try:
        try:
            answer = True, body(rank, *args)
        except dist.DistError as error:
            answer = True, str(error)
        except BaseException:
            answer = False, traceback.format_exc()
        os.write(writing, pickle.dumps(answer))
    finally:
        os._exit(0)
