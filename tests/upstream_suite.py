"""Runs tests of PyTorch's own distributed suite on one backend and writes the outcome of each to a file, as JSON.

`python tests/upstream_suite.py --as-gloo --size 2 --out outcomes.json [--start spawn] [--tests test_broadcast ...]`

The suite decides by the backend's name what to run. With `--as-gloo` it is imported under gloo's name, so that it opens
what it keeps for gloo, and then run on `--backend`, whose name is made equal to gloo's; every rank looks that its group
really is of that backend. Without, the backend goes by its own name, as any plugin does.
"""

import argparse
import json
import logging
import os
import sys
import time
import unittest
import warnings

import torch
import torch.distributed as dist
from expecttest_stub import do_without_expecttest

import torchtp

CLASSES = {"torchtp": "TorchtpBackend", "gloo": "ProcessGroupGloo"}


class AlsoGloo(str):
    """The name of a backend, which equals gloo's too."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other):
        return not self == other


class Outcomes(unittest.TestResult):
    """What became of each test: `passed`, `skipped: why` or `failed: traceback`."""

    def __init__(self):
        super().__init__()
        self.of = {}

    def _note(self, test, outcome):
        self.of[test.id().rpartition(".")[2]] = outcome

    def addSuccess(self, test):
        self._note(test, "passed")

    def addSkip(self, test, reason):
        self._note(test, f"skipped: {reason}")

    def addFailure(self, test, err):
        self._note(test, "failed: " + self._exc_info_to_string(err, test))

    addError = addFailure


def load(backend, as_gloo, size):
    """The module of the suite, imported under the name of `backend` or of gloo."""
    os.environ["BACKEND"] = "gloo" if as_gloo else backend
    os.environ["WORLD_SIZE"] = str(size)
    os.environ.setdefault("INIT_METHOD", f"file://{os.getcwd()}/init")  # a spawned rank inherits that of its test
    do_without_expecttest()
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("plugin", "ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add(backend)
    from torch.testing._internal.distributed import distributed_test

    if as_gloo and backend != "gloo":
        distributed_test.BACKEND = AlsoGloo(backend)
    return distributed_test


def make_class(suite, backend, start):
    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context(start).Process)

        def _barrier(self, *args, **kwargs):
            if dist.is_initialized():
                made = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
                assert (dist.get_backend(), made) == (backend, CLASSES[backend]), (dist.get_backend(), made)
            super()._barrier(*args, **kwargs)

    Suite.__qualname__ = "Suite"  # where a spawned rank finds it
    return Suite


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=CLASSES, default="torchtp")
    parser.add_argument("--as-gloo", action="store_true")
    parser.add_argument("--stand-ins", action="store_true", help="torchtp's calls in place of those closed to plugins")
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), metavar=("INDEX", "COUNT"))
    parser.add_argument("--tests", nargs="*", help="names; all of the suite if left out")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


# Not under `if __name__`: a spawned rank imports this file for the class, and must get the same one.
arguments = parse()
suite = load(arguments.backend, arguments.as_gloo, arguments.size)
Suite = make_class(suite, arguments.backend, arguments.start)
if arguments.stand_ins:
    dist.monitored_barrier = torchtp.monitored_barrier


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    index, count = arguments.shard
    outcomes = Outcomes()
    Suite.setUpClass()
    names = unittest.TestLoader().getTestCaseNames(Suite)
    if arguments.tests:  # other versions of torch may not have all of them
        names = [name for name in names if name in arguments.tests]
    for name in names[index::count]:
        start = time.monotonic()
        Suite(name).run(outcomes)
        print(f"{time.monotonic() - start:6.1f} s {name} {outcomes.of.get(name, '')[:60]}", file=sys.stderr)
    with open(arguments.out, "w") as file:
        json.dump(outcomes.of, file)


if __name__ == "__main__":
    main()
