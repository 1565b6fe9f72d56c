"""The last calls of every process group: written down when something goes wrong, and put side by side afterwards.

Each rank keeps the last 2,000 calls, messages and exchanges of halos of each of its torchtp groups. With `TORCHTP_TRACE=PATH`, or after `write_to(PATH)`,
the first error of a group and SIGTERM (which torchrun sends to the others when one rank fails) write them as JSON lines to
PATH.rank<global rank>.jsonl. `torchtp trace PATH.rank*.jsonl` says where the ranks part.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from torchtp import _C

calls = _C.Trace()


def write_to(path: str | os.PathLike[str], signals: Iterable[int] = (signal.SIGTERM,)) -> None:
    """Write this rank's last calls to `path`.rank<global rank>.jsonl on the first error of a group and on the signals.

    After the dump a signal does what it would have done without it. An empty `path` ends it.
    A file that cannot be written is told on stderr when it is tried. Raises ValueError for a signal that is none or that
    no process can catch (SIGKILL, SIGSTOP).
    """
    numbers = [int(number) for number in signals]
    for number in numbers:
        if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(
                f"write_to: signals are those that a process can catch, but {number} is SIGKILL, SIGSTOP or none: SIGTERM is "
                "what torchrun sends"
            )
    calls.write_to(os.fsencode(path), numbers if os.fspath(path) else [])


def dump(path: str | os.PathLike[str] = "", reason: str = "asked for") -> str:
    """Write this rank's last calls now; returns the file's name.

    "" when there is nothing or nowhere to write, or the file cannot be written, which stderr tells with the reason.
    """
    return os.fsdecode(calls.dump(reason, os.fsencode(path)))


def start() -> None:
    """Do what the environment asks for."""
    if path := os.environ.get("TORCHTP_TRACE"):
        write_to(path)
