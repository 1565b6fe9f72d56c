"""Compares every operator of PyTorch's own database, on cut tensors, with one device, and the way each rank takes with the others'."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from expecttest_stub import do_without_expecttest
from models import make_layout
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchtp
from torchtp.dtensor.notice import told_to

Leaves = list[Any]

# What can't be compared, or is refused with an error that says so.
LEFT_OUT = {
    "empty_like": "gives what was in memory",
    "new_empty": "gives what was in memory",
    "new_empty_strided": "gives what was in memory",
    "cov": "divides by differences of weights that are nothing but rounding",
    "resize_": "changes a shape in place",
    "as_strided": "changes a shape in place, in one of its forms",
    "as_strided.partial_views": "changes a shape in place, in one of its forms",
    "addbmm": "changes a shape in place, in one of its forms",
    "tensor_split": "reads the values of a tensor of indices past the dispatcher",
}

# ... and of second derivatives.
LEFT_OUT_TWICE = {
    "linalg.det": "PyTorch derives it by singular values for subclasses of tensors, which equal values of them do not allow",
}


def database(dtype: torch.dtype) -> list[Any]:
    """All operators of numbers of that dtype that are compared."""
    do_without_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if dtype in op.dtypes and name_of(op) not in LEFT_OUT]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


class Steps(TorchDispatchMode):
    """Writes down what is called with DTensors, and how these are cut and lie in memory: the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, results)) if isinstance(leaf, DTensor)]
        if tensors:
            self.taken.append(f"{func} {[(t.placements, tuple(t.shape), t.stride()) for t in tensors]}")
        return results


class Operator(nn.Module):
    """One call of an operator, of the tensors that are given; other tensors are its parameters and buffers."""

    def __init__(self, function: Callable[..., Any], leaves: Leaves, structure: Any, given: set[int], in_place: bool):
        super().__init__()
        self.function, self.structure, self.given, self.in_place = function, structure, sorted(given), in_place
        self.leaves: Leaves = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or place in given:
                self.leaves.append(leaf)
            elif leaf.requires_grad:
                self.register_parameter(f"of_{place}", nn.Parameter(leaf.detach().clone()))
                self.leaves.append(None)
            else:
                self.register_buffer(f"of_{place}", leaf.detach().clone())
                self.leaves.append(None)

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.given, tensors, strict=True):
            leaves[place] = tensor
        for place in range(len(leaves)):
            held = getattr(self, f"of_{place}", None)
            leaves[place] = leaves[place] if held is None else held
        if self.in_place:
            leaves[self.given[0]] = leaves[self.given[0]].clone()
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _total(outputs: list[Tensor], first_seed: int = 0) -> Tensor | None:
    """A weighted sum of what has a gradient."""
    total: Tensor | None = None
    for number, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        generator = torch.Generator().manual_seed(first_seed + number)
        weighed = output * torch.rand(output.shape, generator=generator, dtype=torch.float64)
        weighed = weighed.real + 2 * weighed.imag if weighed.is_complex() else weighed
        total = weighed.sum() if total is None else total + weighed.sum()
    return total


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _step(module: nn.Module, given: list[Tensor], post: Callable[[Any], Any], twice: bool) -> list[Tensor]:
    """Outputs; afterwards tensors have gradients, or, `twice`, those of a sum of gradients."""
    torch.manual_seed(1234)
    outputs = _tensors(post(module(*given)))
    total = _total(outputs)
    if total is None:
        return outputs
    if not twice:
        total.backward()
        return outputs
    leaves = [tensor for tensor in given if tensor.requires_grad]
    grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True) if leaves else ()
    again = _total([_whole(grad) for grad in grads if grad is not None], first_seed=50)
    if again is not None:
        again.backward()
    return outputs


def _difference(mine: Tensor | None, reference: Tensor | None, of_whole_numbers: bool = False) -> str:
    if mine is None or reference is None:
        there = reference if mine is None else mine
        return "" if there is None or not (there.abs() > 1e-9).any() else "there on one side only"
    mine, reference = _whole(mine.detach()), _whole(reference.detach())
    if (mine.shape, mine.dtype) != (reference.shape, reference.dtype):
        return f"{mine.dtype} {tuple(mine.shape)}, not {reference.dtype} {tuple(reference.shape)}"
    is_rounded = of_whole_numbers and mine.dtype in (torch.float32, torch.complex64)  # what PyTorch makes of them
    near = (1e-5, 1e-6) if is_rounded else (1e-7, 1e-9)
    return "" if torch.allclose(mine, reference, *near, equal_nan=True) else f"{mine} instead of {reference}"


def _compare(
    function: Callable[..., Any],
    sample: Any,
    layout: torchtp.Layout,
    all_cut: bool,
    in_place: bool,
    twice: bool,
    of_whole_numbers: bool,
) -> tuple[str, list[str]] | None:
    """What differs, and the steps taken; None where one device refuses the sample, in place or anyway."""
    leaves, structure = _flat(sample)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    first = leaves[places[0]]
    given = {place for place in places if place == places[0] or (all_cut and leaves[place].shape == first.shape)}

    def inputs(cut: bool) -> list[Tensor]:
        made = (layout.shard(leaves[place].detach()) if cut else leaves[place] for place in sorted(given))
        return [
            tensor.detach().clone().requires_grad_(leaves[place].requires_grad)
            for place, tensor in zip(sorted(given), made, strict=True)
        ]

    one = Operator(function, leaves, structure, given, in_place)
    references = inputs(cut=False)
    try:
        expected = _step(one, references, sample.output_process_fn_grad, twice)
    except Exception:
        return None
    cut = Operator(function, leaves, structure, given, in_place)
    mine = inputs(cut=True)
    steps = Steps()
    with steps, told_to(lambda *_: None):
        outputs = _step(torchtp.parallelize(cut, layout, output="full"), mine, sample.output_process_fn_grad, twice)
        pairs = [*zip(mine, references, strict=True), *zip(cut.parameters(), one.parameters(), strict=True)]
        of_grads = [_difference(a.grad, b.grad) for a, b in (pairs[: len(mine)] if twice else pairs)]
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs, not {len(expected)}", steps.taken
    of_outputs = [_difference(a, b, of_whole_numbers) for a, b in zip(outputs, expected, strict=True)]
    found = [f"output: {text}" for text in of_outputs if text]
    return "; ".join(found + [f"gradient: {text}" for text in of_grads if text]), steps.taken


def _ways(op: Any, twice: bool) -> Iterator[tuple[str, Callable[..., Any], bool, bool]]:
    """Name, function, whether all tensors of the image's shape are cut, and whether it writes in place."""
    yield "", op.op, False, False
    if not twice:
        yield " of cut ones", op.op, True, False
        if op.inplace_variant is not None:
            yield " in place", op.inplace_variant, False, True


def _flat(sample: Any) -> tuple[Leaves, Any]:
    return pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))


def _can_be_cut(sample: Any, layout: torchtp.Layout) -> bool:
    first = next((leaf for leaf in _flat(sample)[0] if isinstance(leaf, Tensor)), None)
    return first is not None and first.dim() >= -min(layout.spatial.values()) and first.layout is torch.strided


def _takes_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _samples(op: Any, most: int, layout: torchtp.Layout, dtype: torch.dtype) -> list[Any]:
    """At most `most` of those that can be cut, from all over their list."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    takes_gradient = op.supports_autograd and _takes_gradients(dtype)
    # past op.sample_inputs, which looks up its caller's source, and seeds all devices anew for each sample
    samples = list(op.sample_inputs_func(op, "cpu", dtype, takes_gradient))
    for number, sample in enumerate(samples if op.name == "meshgrid" else ()):
        sample.kwargs["indexing"] = ("xy", "ij")[number % 2]  # comes out of a set, in another order on each rank
    samples = [sample for sample in samples if _can_be_cut(sample, layout)]
    if len(samples) <= most:
        return samples
    return [samples[(2 * number + 1) * len(samples) // (2 * most)] for number in range(most)]


def compare(
    axes: dict[str, int], most: int, part: tuple[int, int], twice: bool = False, dtype: torch.dtype = torch.float64
) -> dict[str, tuple[str, int]]:
    """On every rank: at most `most` samples of each operator of the part; of each case that one device takes, what differs and a digest of the steps."""
    layout = make_layout(axes)
    found: dict[str, tuple[str, int]] = {}
    operators = [
        op for op in database(dtype) if not twice or (op.supports_gradgrad and name_of(op) not in LEFT_OUT_TWICE)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators[part[0] :: part[1]]:
            for number, sample in enumerate(_samples(op, most, layout, dtype)):
                for way, function, all_cut, in_place in _ways(op, twice):
                    try:
                        compared = _compare(
                            function, sample, layout, all_cut, in_place, twice, not _takes_gradients(dtype)
                        )
                    except dist.DistBackendError:  # one rank alone failed: nothing more can be compared
                        raise
                    except Exception as error:
                        compared = f"{type(error).__name__}: {error}", []
                    if compared is not None:
                        text, steps = compared
                        found[f"{name_of(op)}{way} #{number}"] = text, zlib.crc32("\n".join(steps).encode())
    return found


def complaints(of_ranks: list[dict[str, tuple[str, int]]]) -> list[str]:
    """What any rank found, and cases in which ranks took different steps."""
    found = []
    for case, results in {case: [each[case] for each in of_ranks] for case in of_ranks[0]}.items():
        texts = [text for text, _ in results if text]
        if texts:
            found.append(f"{case}: {texts[0]}")
        elif len({steps for _, steps in results}) > 1:
            found.append(f"{case}: ranks took different steps")
    return found
