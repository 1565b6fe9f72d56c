import os
import re

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import RanksFailed, run_ranks


def _rank_and_pid():
    return dist.get_rank(), os.getpid()


def _sum_of(value):
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def _raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def _die_on(rank):
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def _wait_for_all_but(rank):
    if dist.get_rank() != rank:
        dist.barrier()


def _initialise(backend):
    dist.init_process_group(backend)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def _what_a_process_has_of_its_own():
    return hash("a word"), os.getcwd()


def _destroy():
    dist.destroy_process_group()


def _random_and_empty():
    return torch.rand(3), torch.empty(5).isnan().all().item(), torch.get_num_threads()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_come_in_order_of_ranks_and_workers_are_reused(size):
    first = run_ranks(_rank_and_pid, size)
    assert [rank for rank, _ in first] == list(range(size))
    assert len({pid for _, pid in first} | {os.getpid()}) == size + 1
    assert run_ranks(_rank_and_pid, size) == first
    assert run_ranks(_rank_and_pid, size, fresh=True) != first


def test_neighbours_hash_differently_as_under_torchrun_and_run_where_they_are_called(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.chdir(tmp_path)
    (first, folder), (second, _) = run_ranks(_what_a_process_has_of_its_own, 2, fresh=True)
    assert first != second
    assert folder == str(tmp_path)


def _variable():
    return os.environ.get("TORCHTP_A_VARIABLE")


def test_a_changed_environment_reaches_new_workers(monkeypatch):
    assert run_ranks(_variable, 2, fresh=True) == [None, None]
    monkeypatch.setenv("TORCHTP_A_VARIABLE", "one")
    assert run_ranks(_variable, 2, fresh=True) == ["one", "one"]


def test_ranks_can_talk():
    for total in run_ranks(_sum_of, 3, torch.arange(4.0, dtype=torch.float64)):
        assert total.tolist() == [0, 6, 12, 18]


def test_a_failing_rank_raises_here_with_its_traceback():
    before = run_ranks(_rank_and_pid, 2)
    with pytest.raises(RanksFailed, match="rank 1 raised(.|\n)*_raise_on(.|\n)*ValueError: rank 1 says no") as caught:
        run_ranks(_raise_on, 2, 1)
    assert 1 in caught.value.failures
    assert run_ranks(_rank_and_pid, 2) != before


def test_a_dead_rank_is_named_with_its_output():
    with pytest.raises(RanksFailed, match="rank 0 died with exit status 7(.|\n)*last words"):
        run_ranks(_die_on, 2, 0)


def test_time_out_names_the_ranks_that_did_not_return_and_shows_their_stacks():
    with pytest.raises(TimeoutError, match=re.escape("ranks [0, 2] of 3")) as caught:
        run_ranks(_wait_for_all_but, 3, 1, timeout=2.0)
    assert "_wait_for_all_but" in str(caught.value)


def test_without_backend_the_function_initialises_as_under_torchrun():
    assert run_ranks(_initialise, 2, "gloo", backend=None) == [2.0, 2.0]


def test_a_pool_whose_default_group_was_touched_is_not_reused():
    before = run_ranks(_rank_and_pid, 2)
    run_ranks(_destroy, 2)
    assert run_ranks(_rank_and_pid, 2) != before


def test_workers_are_seeded_alike_on_one_thread_and_empty_is_poisoned():
    (first, poisoned, threads), (second, _, _) = run_ranks(_random_and_empty, 2)
    assert first.equal(second)
    assert run_ranks(_random_and_empty, 2)[0][0].equal(first)
    assert poisoned and threads == 1


def test_a_local_function_is_refused():
    with pytest.raises(ValueError, match="function of a module"):
        run_ranks(lambda: None, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_empty_is_poisoned_here(dtype):
    assert torch.empty(3, dtype=dtype).isnan().all()
    assert torch.ops.aten.empty_strided([3], [1], dtype=dtype).isnan().all()
    assert torch.zeros(3, dtype=dtype).new_empty(3).isnan().all()


def test_a_function_of_the_started_program_is_refused():
    def of_the_program():
        pass

    of_the_program.__module__ = "__main__"
    with pytest.raises(ValueError, match="of_the_program is of the program that was started"):
        run_ranks(of_the_program, 2)
