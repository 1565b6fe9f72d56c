"""What stands on torch.distributed must give the same on the backend torchtp as on gloo."""

import traceback

import torch
from torch.distributed.tensor import DTensor

from torchtp.testing import run_ranks


def whole(tensor):
    """The full tensor behind a DTensor or a tensor, as a plain copy."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def call_each(cases, *args):
    """Results by case; a case that raises gives the kind of its error, which must be gloo's too.

    That is the first of its classes that is Python's own: asked again for a stream, torch raises another class of its own.
    """
    results = {}
    for case in cases:
        torch.manual_seed(0)
        try:
            results[case.__name__] = case(*args)
        except (NotImplementedError, AssertionError, ValueError, RuntimeError, TypeError) as error:
            kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
            results[case.__name__] = (kind.__name__, traceback.format_exc())
    return results


def check(cases, size, *args, fails_on_gloo=(), exact=True, timeout=100):
    """Compare the tensors that each of `cases` returns on every rank, to the bit or (`exact=False`) to 1e-12."""
    theirs, ours = (
        run_ranks(call_each, size, cases, *args, backend=backend, timeout=timeout) for backend in ("gloo", "torchtp")
    )
    wrong = []
    for case in (case.__name__ for case in cases):
        for rank in range(size):
            mine, wanted = ours[rank][case], theirs[rank][case]
            if isinstance(wanted, tuple):
                if case not in fails_on_gloo or not isinstance(mine, tuple) or mine[0] != wanted[0]:
                    wrong.append(f"{case} on rank {rank}: gloo raised {wanted[1]}")
            elif isinstance(mine, tuple):
                wrong.append(f"{case} on rank {rank} raised {mine[1]}")
            elif not wanted or len(mine) != len(wanted):
                wrong.append(f"{case} on rank {rank} gave {len(mine)} tensors, gloo {len(wanted)}")
            else:
                for index, (a, b) in enumerate(zip(mine, wanted, strict=True)):
                    try:
                        tolerance = 0 if exact else 1e-12
                        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
                    except AssertionError as error:
                        wrong.append(f"{case} on rank {rank}, tensor {index}: {error}")
    assert not wrong, "\n".join(wrong)
