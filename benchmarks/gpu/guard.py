"""Runs a command with a time limit of its own, so that its failure, crash or hang stays its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STACKS_SECONDS = 1.0  # what a process gets to write its stacks before it is ended


@dataclass(frozen=True)
class Ending:
    """How a command ended; a negative status is the signal that killed it."""

    status: int
    seconds: float
    timed_out: bool

    def text(self) -> str:
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s"
        return "done" if self.status == 0 else f"ended with status {self.status} after {self.seconds:.0f} s"


def run(command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str] | None = None) -> Ending:
    """Run `command`, appending what it prints to `log`; after `limit` seconds it and all it started are killed."""
    began = time.monotonic()
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            status, timed_out = process.wait(timeout=max(limit, 0.1)), False
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)  # where it stands, if it listens; else it ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_STACKS_SECONDS)
            status, timed_out = -signal.SIGKILL, True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks and compilers it left behind, too
            process.wait()
    return Ending(status, time.monotonic() - began, timed_out)


def output(command: Sequence[str], limit: float = 20.0) -> str:
    """What a short command prints; nothing where it fails or is not there."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=limit, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
