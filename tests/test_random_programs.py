"""Random programs of collectives and messages: right ones have right results, and wrong ones an error."""

from __future__ import annotations

from contextlib import closing

import pytest
from forked import forked, served_store
from random_programs import run_right, run_until_a_death, run_wrong

from torchtp.testing import run_ranks, timeout_scale
from torchtp.testing.namespaces import Hosts, why_not

HOSTS = [(2, 1), (2, 2), (1, 1, 1)]
needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
SECONDS = 1.0


def assert_noticed(ends):
    """All ranks have heard of these faults; another kind may come to the same call."""
    for of_ranks in zip(*ends, strict=True):
        if of_ranks[0][1] in ("dtype", "numel", "op", "root"):
            assert all(told for _, _, told in of_ranks), of_ranks


@pytest.mark.parametrize("size", [2, 4])
def test_random_programs(size):
    assert sum(run_ranks(run_right, size, range(20), backend="torchtp")) > 500


@needs_hosts
def test_random_programs_over_hosts():
    with closing(Hosts((2, 1))) as hosts:
        assert sum(hosts.run(run_right, range(10))) > 250


@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_with_a_fault(size):
    assert_noticed(run_ranks(run_wrong, size, range(12), SECONDS * timeout_scale(), backend="torchtp", timeout=120))


def die(size, seeds):
    """What the ranks of each program ended by; the timeout of their groups is longer than the test waits for them."""
    with served_store() as (_, port):
        return [forked(size, run_until_a_death, size, port, seed) for seed in seeds]


def assert_only_one_died(size, seeds):
    (ends,) = run_ranks(die, 1, size, seeds, backend=None, timeout=300)
    for seed, told in zip(seeds, ends, strict=True):
        survivors = [text for text in told if text is not None]
        assert len(survivors) == size - 1 and all(survivors), (seed, told)


@pytest.mark.parametrize("size", [2, 4])
def test_all_raise_if_a_rank_dies_in_a_random_program(size):
    assert_only_one_died(size, range(6))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_raise_if_a_rank_dies_in_more_random_programs(size):
    for first in range(0, 200, 50):
        assert_only_one_died(size, range(first, first + 50))


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("size", [2, 3, 5])
def test_more_random_programs(size, part):
    run_ranks(run_right, size, range(100 * part, 100 * (part + 1)), backend="torchtp", timeout=300)


@needs_hosts
@pytest.mark.long
@pytest.mark.parametrize("sizes", HOSTS, ids=lambda sizes: " + ".join(map(str, sizes)))
def test_more_random_programs_over_hosts(sizes):
    with closing(Hosts(sizes)) as hosts:
        for first in range(0, 200, 20):
            hosts.run(run_right, range(first, first + 20))


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_more_random_programs_with_a_fault(size, part):
    seeds = range(25 * part, 25 * (part + 1))
    assert_noticed(run_ranks(run_wrong, size, seeds, SECONDS * timeout_scale(), backend="torchtp", timeout=300))


@needs_hosts
@pytest.mark.long
@pytest.mark.parametrize("sizes", HOSTS, ids=lambda sizes: " + ".join(map(str, sizes)))
def test_more_random_programs_with_a_fault_over_hosts(sizes):
    with closing(Hosts(sizes)) as hosts:
        assert_noticed(hosts.run(run_wrong, range(40), SECONDS * timeout_scale()))
