"""Any module on images that are cut: `parallelize` makes it take, compute and give them, and average its gradients."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchtp._compile import leave_eager
from torchtp.dtensor import notice
from torchtp.dtensor.cut import axes_of
from torchtp.dtensor.outside import are_averaged, looking_out
from torchtp.dtensor.rules.fallback import take_custom_ops
from torchtp.dtensor.sharing import complete_given
from torchtp.dtensor.upstream import is_plain
from torchtp.dtensor.wrapping import forget_outgrown
from torchtp.gradients import GradientReducer, complaint_of_options
from torchtp.layout import Layout, check_types
from torchtp.parallel import classes, inner_gradients, lazy, randomness, sync_batch_norm
from torchtp.parallel.agreement import Call
from torchtp.parallel.awaiting import after_backward
from torchtp.parallel.comparisons import Comparisons, is_due
from torchtp.parallel.composition import Composition
from torchtp.parallel.equality import Written, make_equal, tensors_of, weakly
from torchtp.parallel.images import Images, Output, is_image
from torchtp.parallel.refusals import refuse_ended, refuse_transforms
from torchtp.parallel.root import STATE, is_parallelized, root_class
from torchtp.parallel.running import is_inside, is_recomputing, running, runs

Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    module: Module,
    layout: Layout,
    *,
    output: Output = "dtensor",
    reduce: bool = True,
    bucket_bytes: int = 25 << 20,
    compression: str = "none",
) -> Module:
    """Make `module` work on images cut as `layout` says: in place, and returned.

    Parameters and buffers keep their names and stay plain; they are broadcast from the first rank of `layout.group`.
    Inputs: of the plain tensors among the arguments that have the dims of the layout behind their first dim, those with
    the most dims are images, held whole by every rank of a spatial group, and are cut. All others are passed as they
    are. So are DTensors on `layout.spatial_mesh`, which come from `layout.shard`, `layout.from_tile`, or
    `layout.replicate` for what shall not be cut.
    Outputs: DTensors as they are ("dtensor"), this rank's parts ("local"), or whole on every rank ("full").
    Gradients: with `reduce` p.grad is the mean over `layout.group`, which is the gradient, when backward() returns
    (`bucket_bytes`, `compression`: see `torchtp.gradients.GradientReducer`); without, it is this rank's contribution to
    that mean, for DistributedDataParallel or FSDP2 over `layout.group`. Tensors among the arguments get the whole gradient
    of this rank's images, on every rank of its spatial group.

    Raises ValueError on all ranks if parameters, options or images differ, or one has no such value; TypeError for no module, Layout.
    """
    check_types("parallelize", module, layout)
    refuse_ended(layout.group)
    complaint = ""  # told to all ranks, as is what they want of it: the others would wait for this one
    if output not in ("dtensor", "local", "full"):
        complaint = f'output is "dtensor", "local" or "full", but it is "{output}"'
    elif is_parallelized(module):
        complaint = "the module is parallelized already: call torchtp.parallelize once, on the outermost module"
    options = f' with output="{output}", reduce={bool(reduce)}'
    if reduce:
        complaint = complaint or complaint_of_options(bucket_bytes, compression)
        options += f", bucket_bytes={bucket_bytes}, compression={compression}"
    make_equal(module, layout, complaint=complaint, options=options)
    if reduce:  # made here: in a first forward, of several threads, ranks might make it in another order
        _ = layout.gradient_group
    take_custom_ops()
    lazy.prepare(module)
    sync_batch_norm.prepare(module, layout)
    state = _State(layout, output, {"bucket_bytes": bucket_bytes, "compression": compression} if reduce else None)
    for part in module.modules():
        if is_parallelized(part):
            getattr(part, STATE).hand_over(state)
    state.equal = weakly(tensor for _, tensor in tensors_of(module))
    state.forward = module.__dict__.pop("forward", None)
    object.__setattr__(module, STATE, state)
    classes.reclass(module, root_class)
    state.await_gradients(module)
    return module


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backward() accumulates this rank's contributions; the first one outside averages all that came together.

    Takes the parallelized module, or one that contains it.
    """
    parts = [part for part in module.modules() if is_parallelized(part)] if isinstance(module, nn.Module) else []
    if not parts:
        raise ValueError("torchtp.no_sync takes a module that torchtp.parallelize was called on")
    with contextlib.ExitStack() as stack:
        for part in parts:
            reducer = getattr(part, STATE).reducer(part)
            if reducer is not None:
                reducer.prepare()  # what is trained inside may go past forward
                stack.enter_context(reducer.no_sync())
        yield


_WHERE_TO_RENEW = "the next forward must be in training mode and outside of torchtp.no_sync, where all ranks take it up"


class _State:
    """What a parallelized module carries."""

    def __init__(self, layout: Layout, output: Output, reduces: dict[str, Any] | None):
        self.layout = layout
        self._output = output
        self._images = Images(layout, output)
        self._reduces = reduces  # options of the reducer
        self._reducer: GradientReducer | None = None
        # Of modules around this one, which see to gradients while there are any.
        self._outer: list[weakref.ref[_State]] = []
        self._awaiting: list[Any] = []  # hooks of parameters, until there is a reducer
        self._composition = Composition(layout)
        self.equal = weakly(())  # what was broadcast already
        self._written = Written(layout)
        self._parts: list[nn.Module] | None = None
        self._eager: Any = None  # `run` as torch.compile shall see it
        self._said_uncut = False
        self._comparisons = Comparisons(layout)
        self.forward: Any = None  # what was put in the place of the class's own, on this module alone
        self.under_way: Any = None  # the same while it runs

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        copied = _State(self.layout, self._output, self._reduces)  # the copy reduces its own gradients
        known = (memo.get(id(key)) for key in self.equal)  # the copy's own buffers, too: data ranks keep theirs
        copied.equal = weakly(tensor for tensor in known if isinstance(tensor, torch.Tensor))
        copied._written = copy.deepcopy(self._written, {id(self.layout): self.layout})
        copied.forward = copy.deepcopy(self.forward, memo)
        return copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a parallelized module belongs to its process groups and can't be pickled: save its state_dict()"
        )

    def call(self, *arguments: Any) -> Any:
        """`run`, never compiled: torch.compile around or inside a parallelized module leaves it eager."""
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
            return self.run(*arguments)
        if self._eager is None:
            self._eager = torch.compiler.disable(_State._run_eagerly)  # of a bound method it would hold itself
        return self._eager(self, *arguments)

    def _run_eagerly(self, *arguments: Any) -> Any:
        leave_eager()
        with torch.compiler.set_stance("force_eager"):  # what is compiled inside, too
            return self.run(*arguments)

    def run(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut the images, call `forward`, give its outputs the wanted form."""
        refuse_transforms(module, (args, kwargs))
        if is_inside() and not self._is_recomputed(args, kwargs):
            return forward(*args, **kwargs)
        refuse_ended(self.layout.group)
        forget_outgrown(self.layout.spatial_mesh)
        is_new = torch.is_grad_enabled() and self._composition.look(module)
        reducer = self.reducer(module) if torch.is_grad_enabled() else None
        if reducer is not None:
            axes_of(self.layout.spatial_mesh).averages = True
            reducer.prepare()  # a failed backward's messages come before this forward's
        elif is_new and self._reduces is None:
            are_averaged(module.parameters(), self)
        tensors, complaint = self._images.describe(args, kwargs)
        everyone = reducer is not None and module.training
        stranger = ""
        if is_new:
            self._prepare_parts(module)
        if is_new and reducer is not None:
            stranger = self._composition.stranger(module, reducer.parameters, takes_up=everyone and reducer.syncs)
            if stranger and not (everyone and reducer.syncs):
                complaint, stranger = complaint or f"{stranger}: {_WHERE_TO_RENEW}", ""
        of_devices = self._comparisons.call()
        averages, parts = _averages(reducer), self._parts_of(module)
        agreed = self.layout.agreement.check(
            Call(
                tensors,
                complaint,
                _mode(module, parts, averages, self.layout.mesh.device_type),
                averages,
                randomness.fingerprint(self.layout),
                self._written.digest(module, self._composition.newcomers(module) if is_new and everyone else ()),
                stranger,
                lambda: self._images.samples(args, kwargs, of_devices=of_devices),
                everyone,
            )
        )
        if stranger:
            self._reducer = None
            reducer = self.reducer(module)
        if everyone and reducer is not None:
            self._written.settle(module, agreed.written)
            self._comparisons.train(zip(reducer.names, reducer.parameters, strict=True))
        elif self._reduces is not None:
            self._comparisons.evaluate(module)
        if self.layout.num_shards > 1 and not self._said_uncut and not any(map(is_image, tensors)):
            self._said_uncut = True
            notice.uncut(type(module).__name__, repr(self.layout))
        arguments = self._images.cut(args, kwargs)
        with (
            randomness.stream(self.layout, agreed.notes),
            self._composition.given(),
            inner_gradients.averaged(self.layout.spatial_mesh, self._composition.parameters),
            looking_out(),
            lazy.given_back_buffers(parts) as buffers,
            running(self) as written,
            self._written.watched(module, written),
        ):
            outputs = forward(*arguments.args, **arguments.kwargs)
        self._written.note(module, lazy.settle_buffers(buffers))
        if self.layout.num_shards > 1:
            for leaf in pytree.tree_leaves(outputs):
                if is_plain(leaf):
                    complete_given(leaf, self.layout.spatial_mesh)
        outputs, contents = arguments.settle(outputs, lambda nested: self._images.give(nested, tensors))
        if reducer is not None:
            for leaf in pytree.tree_leaves((outputs, contents)):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    reducer.watch(leaf)
        return outputs

    def _is_recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a checkpoint around this module runs it again, with whole images, for a gradient that a forward takes itself."""
        return is_recomputing() and (
            runs(self) or not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        )

    def reducer(self, module: nn.Module) -> GradientReducer | None:
        """Made at the first forward that records gradients: until then parameters may be replaced or frozen."""
        if self._reducer is None and (options := self._options()) is not None:
            named = list(module.named_parameters())
            if any(isinstance(part, FSDPModule) for part in module.modules()):
                raise ValueError("FSDP2 reduces gradients itself: torchtp.parallelize(..., reduce=False) inside it")
            if named and not self._composition.is_computed:
                # What has replaced something since `parallelize` is broadcast as well.
                make_equal(module, self.layout, self.equal, self._averaged_elsewhere(named))
                self._prepare_parts(module)
                self._composition.taken_up(module)
                self.equal = weakly(tensor for _, tensor in tensors_of(module))
                self._reducer = GradientReducer(named, self.layout.gradient_group, **options)
                _averaging[self] = weakref.ref(module)
                self._stop_awaiting()
        return self._reducer

    def _averaged_elsewhere(self, named: Sequence[tuple[str, torch.Tensor]]) -> str:
        """What is wrong with parameters that another parallelized module averages too: each would undo the other's."""

        def taken() -> str | None:
            theirs = {id(one) for state, other in _averaging.items() for one in state.still_averages(other())}
            return next((name for name, one in named if one.requires_grad and id(one) in theirs), None)

        if taken() is None:
            return ""
        gc.collect()  # a module that is gone, but for cycles
        if (name := taken()) is None:
            return ""
        return (
            f"parameter {name!r} is averaged by another module that torchtp.parallelize was called on: parallelize one "
            "module that contains both, or each with reduce=False and give the parameters of both to one "
            "torchtp.gradients.GradientReducer over layout.gradient_group"
        )

    def still_averages(self, module: nn.Module | None) -> Sequence[torch.Tensor]:
        """The parameters that the reducer of that module has; none any more if some of them were taken out of it."""
        if self._reducer is not None and module is not None:
            own = set(map(id, module.parameters()))
            if all(id(one) in own for one in self._reducer.parameters):
                return self._reducer.parameters
            self._composition.forget()  # made anew at its next forward
            self._reducer = None
        return ()

    def parameters_changed(self) -> None:
        """Keep averaging the gradients of parameters that were cast or moved."""
        if self._reducer is not None:
            self._reducer.prepare()

    def hand_over(self, outer: _State) -> None:
        """Leave gradients to an outer module that is being parallelized, for as long as it is there."""
        self._outer.append(weakref.ref(outer))
        self._reducer = None
        self._stop_awaiting()

    def _options(self) -> dict[str, Any] | None:
        """Those of the reducer; None where others see to gradients, or there is nobody to average them with."""
        if self._reduces is None or self.layout.group.size() == 1:
            return None
        if self._outer and is_due(self._comparisons.calls) and any(state() for state in self._outer):
            gc.collect()  # one that is gone, but for cycles
        self._outer = [state for state in self._outer if state() is not None]
        return None if self._outer else self._reduces

    def _stop_awaiting(self) -> None:
        while self._awaiting:
            self._awaiting.pop().remove()

    def await_gradients(self, module: nn.Module) -> None:
        """Have gradients averaged that come before any forward: of methods such as `encode`, which are called past it."""
        self._composition.share(module)

        def reduce() -> None:
            if self._reducer is None:
                self._composition.look(module)  # what stood in for parameters in forward is gone by now
                if (reducer := self.reducer(module)) is not None:
                    reducer.reduce()

        if self._options() is not None:
            self._awaiting = after_backward(module.parameters(), reduce)

    def _prepare_parts(self, module: nn.Module) -> None:
        lazy.prepare(module)
        sync_batch_norm.prepare(module, self.layout)
        self._parts = None

    def _parts_of(self, module: nn.Module) -> list[nn.Module]:
        if self._parts is None or not torch.is_grad_enabled():  # there nobody looks for new ones
            # Without itself, or it would not be gone when the program drops it.
            self._parts = [part for part in module.modules() if part is not module]
        return [module, *self._parts]


def _mode(module: nn.Module, parts: Sequence[nn.Module], averages: str, device_type: str) -> str:
    """How the module is called, in words."""
    modes = ["in evaluation", "in training"]
    words = [modes[module.training]]
    if any(part.training != module.training for part in parts):  # a dropout, a norm with frozen statistics
        names = [name for name, part in module.named_modules() if part.training != module.training]
        words.append(f"with {len(names)} parts {modes[not module.training]} ({names[0]!r} to {names[-1]!r})")
    if torch.is_inference_mode_enabled():
        words.append("in inference mode")
    elif not torch.is_grad_enabled():
        words.append("without gradients")
    if averages:
        words.append(averages)
    if torch.is_autocast_enabled(device_type):
        words.append(f"under autocast to {torch.get_autocast_dtype(device_type)}")
    if notice.is_strict():  # it would refuse what the others begin to gather
        words.append("under torchtp.strict")
    return "calls it " + ", ".join(words)


def _averages(reducer: GradientReducer | None) -> str:
    """Which gradients are averaged, in words; empty where all are."""
    if reducer is None:
        return ""
    words = [] if reducer.syncs else ["under torchtp.no_sync"]
    if frozen := reducer.frozen:
        told = ", ".join(f"{run[0]!r} to {run[-1]!r}" for run in frozen)
        words.append(f"with {sum(map(len, frozen))} parameters frozen ({told})")
    return ", ".join(words)


# Those that have a reducer, and whose they are.
_averaging: weakref.WeakKeyDictionary[_State, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
