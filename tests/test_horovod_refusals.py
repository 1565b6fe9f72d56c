"""What Horovod's face refuses: every rank raises, and nothing hangs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchtp.horovod as hvd
from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks


def _caught(check, *arguments):
    """(type, message) of what a check raises, and whether the group still works afterwards."""
    hvd.init()
    try:
        check(hvd.rank(), *arguments)
    except (TypeError, ValueError) as error:
        assert hvd.allreduce(torch.ones(2), False).tolist() == [2, 2]
        return type(error).__name__, str(error)
    return None, "nothing was raised"


def _optimizer():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _half_named(rank):
    model, optimizer = _optimizer()
    hvd.DistributedOptimizer(optimizer, named_parameters=model[0].named_parameters())


def _named_twice(rank):
    model, optimizer = _optimizer()
    hvd.DistributedOptimizer(optimizer, [*model[0].named_parameters(), *model[1].named_parameters()])


def _half_named_on_one(rank):
    model, optimizer = _optimizer()
    hvd.DistributedOptimizer(optimizer, (model[0] if rank else model).named_parameters())


def _keep_its_own(optimizer, state):
    raise ValueError("it keeps its own")


def _stubborn_optimizer():
    optimizer = _optimizer()[1]
    optimizer.register_load_state_dict_pre_hook(_keep_its_own)
    return optimizer


def _optimizer_state(rank):
    model, optimizer = _optimizer()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(optimizer.state_dict())


CHECKS = {
    "op": lambda rank: hvd.DistributedOptimizer(_optimizer()[1], op=hvd.Max),
    "twice": lambda rank: hvd.DistributedOptimizer(hvd.DistributedOptimizer(_optimizer()[1])),
    "later": lambda rank: hvd.DistributedOptimizer(_optimizer()[1]).add_param_group({"params": _named("a")[0][1]}),
    "factor": lambda rank: hvd.DistributedOptimizer(_optimizer()[1], op=hvd.Sum, gradient_predivide_factor=2.0),
    "dense": lambda rank: hvd.DistributedOptimizer(_optimizer()[1], sparse_as_dense=True),
    "process set": lambda rank: hvd.DistributedOptimizer(_optimizer()[1], process_set=3),
    "passes": lambda rank: hvd.DistributedOptimizer(_optimizer()[1], backward_passes_per_step=0),
    "no optimizer": lambda rank: hvd.DistributedOptimizer(_optimizer()[0]),
    "half named": _half_named,
    "half named on one": _half_named_on_one,
    "named twice": _named_twice,
    "unnamed": lambda rank: hvd.DistributedOptimizer(_optimizer()[1], _optimizer()[0].parameters()),
    "compression": lambda rank: hvd.allreduce(torch.ones(2), compression="fp8"),
    "both": lambda rank: hvd.allreduce(torch.ones(2), False, op=hvd.Sum),
    "name": lambda rank: hvd.allreduce_(torch.ones(2), "gradient"),
    "bool": lambda rank: hvd.allreduce(torch.ones(2) > 0),
    "sparse": lambda rank: hvd.allreduce_async(torch.ones(2).to_sparse()),
    "one tensor": lambda rank: hvd.grouped_allreduce(torch.ones(2)),
    "root": lambda rank: hvd.broadcast(torch.ones(2), 2),
    "scalar": lambda rank: hvd.allgather(torch.ones(())),
    "scalar on one": lambda rank: hvd.allgather(torch.ones((1,) * rank)),
    "scattered scalar": lambda rank: hvd.reducescatter(torch.ones(())),
    "columns": lambda rank: hvd.allgather(torch.ones(2, 3 + rank)),
    "kinds": lambda rank: hvd.allgather(torch.ones(2, dtype=torch.float64 if rank else torch.float32)),
    "list": lambda rank: hvd.allgather([1.0, 2.0]),
    "uneven": lambda rank: hvd.alltoall(torch.ones(3)),
    "splits on one": lambda rank: hvd.alltoall(torch.ones(3), [1, 2 + rank]),
    "fractions": lambda rank: hvd.alltoall(torch.ones(3), [1.5, 1.5]),
    "unpicklable": lambda rank: hvd.broadcast_object((lambda: 0) if rank == 0 else None),
    "unpicklable on one": lambda rank: hvd.allgather_object((lambda: 0) if rank == 1 else 3),
    "handle": lambda rank: hvd.synchronize(3),
    "polled": lambda rank: hvd.poll(None),
    "optimizer state": _optimizer_state,
    "no tensors": lambda rank: hvd.broadcast_parameters(3),
    "state_dict": lambda rank: hvd.broadcast_optimizer_state(_optimizer()[1].state_dict()),
    "names of nothing": lambda rank: GradientReducer(["a"]),
    "negative norm": lambda rank: GradientReducer(_optimizer()[0]).clip_grad_norm_(-1.0),
    "unknown name": lambda rank: GradientReducer(_optimizer()[0]).holds("q"),
}


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("op", "ValueError", "op is Average or Sum"),
        ("twice", "ValueError", "distributed already"),
        ("later", "ValueError", "add all groups before"),
        ("factor", "ValueError", "not 1 only with op Average, but it is 2.0 with"),
        ("dense", "ValueError", "use nn.Embedding(sparse=False)"),
        ("process set", "ValueError", "new_group(ranks) makes groups of ranks"),
        ("passes", "ValueError", "interval is 0"),
        ("no optimizer", "TypeError", "it is a Sequential"),
        ("half named", "ValueError", "2 of 4 have no name, the first of shape (2, 6)"),
        ("half named on one", "ValueError", "2 of 4 have no name"),
        ("named twice", "ValueError", "'weight', 'bias' stands there more than once"),
        ("unnamed", "ValueError", "named_parameters are (name, parameter)"),
        ("compression", "ValueError", "compression is one of none, fp16, bf16, but it is 'fp8'"),
        ("both", "ValueError", "give op or average, not both"),
        ("name", "TypeError", "average is True, False or None, but it is 'gradient'"),
        ("bool", "ValueError", "a torch.bool tensor has no mean"),
        ("sparse", "TypeError", "its layout is torch.sparse_coo: pass tensor.to_dense()"),
        ("one tensor", "TypeError", "a list of tensors, but it is a Tensor"),
        ("root", "ValueError", "root_rank is one of 0 to 1, but it is 2"),
        ("scalar", "ValueError", "a tensor of no dims has no dim 0"),
        ("scalar on one", "ValueError", "a tensor of no dims has no dim 0"),
        ("scattered scalar", "ValueError", "a tensor of no dims has no dim 0"),
        ("columns", "ValueError", "torch.float32 of shape (2, 3) where rank 1's is torch.float32 of shape (2, 4)"),
        ("kinds", "ValueError", "where rank 1's is torch.float64"),
        ("list", "TypeError", "it is a list"),
        ("uneven", "ValueError", "3 rows are not a multiple of 2 ranks"),
        ("splits on one", "ValueError", "how many of the 3 rows go to each of the 2 ranks, but it is [1, 3]"),
        ("fractions", "TypeError", "of integers, but it is [1.5, 1.5]"),
        ("unpicklable", "TypeError", "its function of rank 0 cannot"),
        ("unpicklable on one", "TypeError", "its function of rank 1 cannot"),
        ("handle", "TypeError", "but it is a int"),
        ("polled", "TypeError", "but it is a NoneType"),
        ("optimizer state", "TypeError", "broadcast_optimizer_state"),
        ("no tensors", "TypeError", "'it' of rank 0 is a int"),
        ("state_dict", "TypeError", "it is a dict: pass the optimizer itself"),
        ("names of nothing", "TypeError", "number 0 is a str, 'a'"),
        ("negative norm", "ValueError", "max_norm is not negative, but it is -1.0"),
        ("unknown name", "ValueError", "'q' is no parameter of this reducer, whose names are '0.weight'"),
    ],
)
def test_mistakes_are_refused_on_every_rank(how, kind, message):
    for caught in run_ranks(_run, 2, how, backend="torchtp"):
        assert caught[0] == kind and message in caught[1], caught


def _run(how):
    return _caught(CHECKS[how])


def _named(*names):
    return [(name, nn.Parameter(torch.ones(2))) for name in names]


# What one rank makes a mistake in and the others do right; the last is whether the group outlives it.
ON_ONE = {
    "reducer of names": (lambda: GradientReducer(["a"]), lambda: GradientReducer(_named("a")), True),
    "reducer of nothing": (lambda: GradientReducer([]), lambda: GradientReducer(_named("a")), True),
    "reducer of computed": (
        lambda: GradientReducer([("a", _named("a")[0][1] * 2)]),
        lambda: GradientReducer(_named("a")),
        True,
    ),
    "reducer of 3": (lambda: GradientReducer(3), lambda: GradientReducer(_named("a")), True),
    "reducer's compression": (
        lambda: GradientReducer(_named("a"), compression="fp8"),
        lambda: GradientReducer(_named("a"), compression="fp16"),
        True,
    ),
    "reducer's packing": (
        lambda: GradientReducer(_named("a"), packing="loose"),
        lambda: GradientReducer(_named("a")),
        True,
    ),
    "reducer's bytes": (
        lambda: GradientReducer(_named("a"), bucket_bytes=-1),
        lambda: GradientReducer(_named("a")),
        True,
    ),
    "no optimizer": (
        lambda: hvd.DistributedOptimizer(3),
        lambda: hvd.DistributedOptimizer(_optimizer()[1]),
        True,
    ),
    "compression": (
        lambda: hvd.DistributedOptimizer(_optimizer()[1], compression="fp8"),
        lambda: hvd.DistributedOptimizer(_optimizer()[1]),
        True,
    ),
    "passes": (
        lambda: hvd.DistributedOptimizer(_optimizer()[1], backward_passes_per_step=2),
        lambda: hvd.DistributedOptimizer(_optimizer()[1]),
        True,
    ),
    "no passes": (
        lambda: hvd.DistributedOptimizer(_optimizer()[1], backward_passes_per_step=0),
        lambda: hvd.DistributedOptimizer(_optimizer()[1]),
        True,
    ),
    "root of parameters": (
        lambda: hvd.broadcast_parameters({"a": torch.ones(2)}, 5),
        lambda: hvd.broadcast_parameters({"a": torch.ones(2)}),
        True,
    ),
    "other root of parameters": (
        lambda: hvd.broadcast_parameters({"a": torch.ones(2)}, 1),
        lambda: hvd.broadcast_parameters({"a": torch.ones(2)}),
        True,
    ),
    "state": (
        lambda: hvd.broadcast_optimizer_state({}),
        lambda: hvd.broadcast_optimizer_state(_optimizer()[1]),
        True,
    ),
    "other groups": (
        lambda: hvd.broadcast_optimizer_state(torch.optim.SGD(_named("a"), lr=1.0)),
        lambda: hvd.broadcast_optimizer_state(_optimizer()[1]),
        True,
    ),
    "state that does not load": (
        lambda: hvd.broadcast_optimizer_state(_stubborn_optimizer()),
        lambda: hvd.broadcast_optimizer_state(_optimizer()[1]),
        True,
    ),
    "root of state": (
        lambda: hvd.broadcast_optimizer_state(_optimizer()[1], 1),
        lambda: hvd.broadcast_optimizer_state(_optimizer()[1]),
        True,
    ),
    "allreduce": (lambda: hvd.allreduce(3), lambda: hvd.allreduce(torch.ones(2)), False),
    "in place": (
        lambda: hvd.allreduce_(torch.ones(2), op="median"),
        lambda: hvd.allreduce_(torch.ones(2)),
        False,
    ),
    "grouped": (
        lambda: hvd.grouped_allreduce([torch.ones(2), 3]),
        lambda: hvd.grouped_allreduce([torch.ones(2)] * 2),
        False,
    ),
    "reducescatter": (
        lambda: hvd.reducescatter(torch.ones(())),
        lambda: hvd.reducescatter(torch.ones(2)),
        False,
    ),
    "factor": (
        lambda: hvd.allreduce(torch.ones(2), prescale_factor=None),
        lambda: hvd.allreduce(torch.ones(2)),
        False,
    ),
    "no rows": (lambda: hvd.reducescatter(torch.ones(0)), lambda: hvd.reducescatter(torch.ones(4)), False),
    "another op": (
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum),
        lambda: hvd.allreduce(torch.ones(2)),
        False,
    ),
    "broadcast": (lambda: hvd.broadcast(3, 0), lambda: hvd.broadcast(torch.ones(2), 0), False),
    "broadcast's root": (
        lambda: hvd.broadcast_(torch.ones(2), "0"),
        lambda: hvd.broadcast_(torch.ones(2), 0),
        False,
    ),
    "object's root": (lambda: hvd.broadcast_object(3, 2), lambda: hvd.broadcast_object(3), False),
}


def _on_one(how):
    hvd.init()
    wrong, right, goes_on = ON_ONE[how]
    try:
        (wrong if hvd.rank() == 1 else right)()
    except (RuntimeError, TypeError, ValueError) as error:
        caught = type(error).__name__, str(error)
    else:
        return None
    if goes_on:
        assert hvd.allreduce(torch.ones(2), False).tolist() == [2, 2]
    return caught


@pytest.mark.parametrize("how", ON_ONE)
def test_a_mistake_of_one_rank_raises_on_all(how):
    goes_on = ON_ONE[how][2]
    caught = run_ranks(_on_one, 2, how, backend="torchtp", fresh=not goes_on, timeout=20)
    assert all(caught)
    if goes_on:
        assert caught[0][0] == caught[1][0] and caught[1][1] in caught[0][1]
    elif how == "another op":
        assert all("SUM" in text and "AVG" in text for _, text in caught)
    elif how == "no rows":
        assert all("0 elements" in text and "2 elements" in text for _, text in caught)
    else:
        assert "refused" in caught[0][1] and caught[1][0] in ("TypeError", "ValueError")


@pytest.mark.parametrize(
    "call",
    [
        hvd.size,
        hvd.rank,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.allgather(torch.ones(2)),
        lambda: hvd.broadcast_object(3),
        lambda: hvd.broadcast_parameters({}),
        lambda: hvd.DistributedOptimizer(_optimizer()[1]),
    ],
)
def test_calls_before_init_say_so(call):
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        call()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ProcessSet", "torch.distributed.new_group"),
        ("SyncBatchNorm", "torch.nn.SyncBatchNorm"),
        ("join", "torch.distributed.algorithms.join.Join"),
        ("elastic", "torchrun --max-restarts"),
        ("Adasum", "hvd.Average and hvd.Sum"),
        ("nothing", "has no attribute 'nothing'"),
    ],
)
def test_what_is_absent_names_what_there_is_instead(name, instead):
    with pytest.raises(AttributeError, match=instead):
        getattr(hvd, name)
    assert not hasattr(hvd, name)
