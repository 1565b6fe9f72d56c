"""Ranks that cut one image must call a model alike; whether they do is asked in one message of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtp.parallel.digest import digest
from torchtp.parallel.samples import Samples, difference, digest_of, samples_of

# What it is, its global shape, its dtype; None of what is no tensor.
Described = tuple[str, torch.Size, torch.dtype | None]

_COMPLAINS, _EVERYONE, _MODE, _AVERAGES, _NUM, _HASH, _VALUES, _NOTE, _WRITTEN, _STRANGER, _KIND, _WORDS = range(12)
_MOST_OF_A_PARAMETER = 16
_CALL, _MODULES, _PARAMETERS = range(3)  # what is asked, and as what a rank is told of it
_DOES = (
    "calls the module",
    "makes, copies or renews a parallelized module, or calls one with gradients for the first time",
    "compares its parameters",
)


@dataclass(frozen=True)
class Call:
    """What a rank is about to do with an image."""

    tensors: Sequence[Described] = ()
    complaint: str = ""  # what is wrong with it to begin with
    mode: str = ""  # how it does it: in training, say
    averages: str = ""  # which gradients are averaged, of its mode what the ranks of all images have to agree on
    note: int = 0  # what the ranks of the image need not agree on, but shall know of each other
    written: int = 0  # the same of all ranks
    stranger: str = ""  # a sentence on a part of the module that is new
    held: Callable[[], Samples] = list  # takes samples of `tensors`, one for each, or none at all
    everyone: bool = False  # whether those of other images wait for it, so that an error must reach them as well


class Agreed(NamedTuple):
    """What the ranks said beside what they must agree on."""

    notes: list[int]  # of the ranks of this image
    written: list[int]  # of all ranks that were asked


class Agreement:
    """Compares what the ranks that cut one image are about to do, and raises the same error on all of them.

    The message is a digest; only ranks that disagree send what they have in full.
    """

    def __init__(self, spatial: dist.ProcessGroup, everyone: dist.ProcessGroup, device_type: str):
        self._spatial = spatial
        self._everyone = everyone
        self._device_type = device_type

    def check(self, call: Call) -> Agreed:
        """Raise ValueError on all ranks if one complains or the ranks of an image differ.

        So it does if some ranks alone have a part of the module that is new, if they average other gradients, and if samples
        of their tensors are apart by more than rounding. Collective over the spatial group; over all data ranks too where a
        rank of the image asks for it.
        """
        if is_alone(self._spatial):
            rows, told = [_encode(call)], call.complaint
        else:
            samples = [] if call.complaint else call.held()
            rows = self._gather(self._spatial, _encode(call, digest_of(samples)))
            told = self._what_is_wrong(call, samples, rows)
        notes = [row[_NOTE] for row in rows]
        if any(row[_EVERYONE] for row in rows) and not is_alone(self._everyone):
            told, rows = self._among_everyone(call, told, rows)
        if told:
            raise ValueError(told)
        return Agreed(notes, [row[_WRITTEN] for row in rows])

    def _what_is_wrong(self, call: Call, samples: Samples, rows: list[list[int]]) -> str:
        group = self._spatial
        if any(row[_COMPLAINS] for row in rows):
            return _first_complaint(group, call.complaint)
        if any(row[_MODE] != rows[0][_MODE] for row in rows):
            return (
                f"the ranks that cut one image call the module in different ways: {_first_pair(group, [call.mode])}; "
                "call it alike on all of them, also to evaluate it"
            )
        if any(row[_NUM : _HASH + 1] != rows[0][_NUM : _HASH + 1] for row in rows):
            return (
                f"the ranks that cut one image disagree on it: {_first_difference(group, call.tensors)}; give all of "
                "them images of the same global shape and dtype, and the same other tensors"
            )
        if any(row[_VALUES] != rows[0][_VALUES] for row in rows):
            apart = _first_apart(group, [_told(one) for one in call.tensors], samples)
            if apart:
                return (
                    f"the ranks that cut one image hold different ones: {apart}; give all of them the same by seeding "
                    "generators, samplers and augmentations by layout.data_rank, not by the rank, or cut tiles of one "
                    "image with layout.from_tile"
                )
        return ""

    def _among_everyone(self, call: Call, told: str, rows: list[list[int]]) -> tuple[str, list[list[int]]]:
        """What is wrong on any rank of any image, and what all of them said; `rows` is what those of this image did."""
        if self._everyone.size() > self._spatial.size():
            rows = self._gather(self._everyone, _encode(replace(call, complaint=told)))
            if any(row[_COMPLAINS] for row in rows):
                return _first_complaint(self._everyone, told, names_the_rank=is_alone(self._spatial)), rows
            if any(row[_AVERAGES] != rows[0][_AVERAGES] for row in rows):
                apart = _first_pair(self._everyone, [f"calls it {call.averages or 'to average all of them'}"])
                told = (
                    f"gradients are averaged over all data ranks, which call the module in different ways: {apart}; enter "
                    "torchtp.no_sync and freeze parameters alike on all of them"
                )
        if not told and len({row[_STRANGER] for row in rows}) > 1:
            alone = call.stranger and f"{call.stranger}, on some ranks alone: change the module alike on all of them"
            told = _first_complaint(self._everyone, alone)
        return told, rows

    def check_modules(self, tensors: Sequence[Described], complaint: str = "") -> None:
        """Raise ValueError on all ranks of all images if one complains or they have different parameters."""
        if is_alone(self._everyone):
            if complaint:
                raise ValueError(complaint)
            return
        table = self._gather(self._everyone, _encode(Call(tensors, complaint), kind=_MODULES))
        if any(row[_COMPLAINS] for row in table):
            raise ValueError(_first_complaint(self._everyone, complaint))
        if any(row[_HASH] != table[0][_HASH] for row in table):
            difference = _first_difference(self._everyone, tensors)
            raise ValueError(
                f"the modules of the ranks differ: {difference}; build the same module and layout on all ranks"
            )

    def check_parameters(self, named: Sequence[tuple[str, torch.Tensor]], *, of_one_image: bool = False) -> None:
        """Raise ValueError on all ranks, of all images or of one, if some have other values than the first. Collective."""
        group = self._spatial if of_one_image else self._everyone
        if is_alone(group):
            return
        samples = samples_of([tensor for _, tensor in named], _MOST_OF_A_PARAMETER)
        rows = self._gather(group, _encode(Call(), digest_of(samples), _PARAMETERS))
        if any(row[_VALUES] != rows[0][_VALUES] for row in rows):
            apart = _first_apart(group, [name for name, _ in named], samples)
            if apart:
                raise ValueError(
                    f"the ranks {'evaluate' if of_one_image else 'train'} different models: {apart}; change parameters alike "
                    "on all ranks: the same optimizer and options, the same checkpoint, the same new values"
                )

    def _gather(self, group: dist.ProcessGroup, mine: list[int]) -> list[list[int]]:
        device = torch.device(self._device_type)
        if torch.device("cpu") in group._device_types:  # no device synchronisation
            device = torch.device("cpu")
        rows = torch.empty(group.size() * _WORDS, dtype=torch.int64, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
        gather(rows, torch.tensor(mine, dtype=torch.int64, device=device), group=group)
        told: list[list[int]] = rows.view(-1, _WORDS).tolist()
        if any(row[_KIND] != told[0][_KIND] for row in told):
            apart = _first_pair(group, [_DOES[mine[_KIND]]])
            raise ValueError(f"the ranks do different things at once: {apart}; do them in one order on all ranks")
        return told


def is_alone(group: dist.ProcessGroup) -> bool:
    return group.size() == 1 or dist.get_backend(group) == "fake"


def _encode(call: Call, values: int = 0, kind: int = _CALL) -> list[int]:
    row = [0] * _WORDS
    row[_COMPLAINS] = bool(call.complaint)
    row[_EVERYONE] = call.everyone
    row[_MODE] = digest(call.mode.encode())
    row[_AVERAGES] = digest(call.averages.encode())
    row[_NUM] = len(call.tensors)
    row[_HASH] = digest(repr([(what, tuple(shape), str(dtype)) for what, shape, dtype in call.tensors]).encode())
    row[_VALUES] = values
    row[_NOTE] = call.note
    row[_WRITTEN] = call.written
    row[_STRANGER] = bool(call.stranger)
    row[_KIND] = kind
    return row


def _first_complaint(group: dist.ProcessGroup, mine: str, *, names_the_rank: bool = True) -> str:
    """Only when something is wrong already are there messages of any length."""
    complaints: list[str | None] = [None] * group.size()
    dist.all_gather_object(complaints, mine, group=group)
    rank, text = next((rank, text) for rank, text in enumerate(complaints) if text)
    return f"{text} (on rank {dist.get_global_rank(group, rank)})" if names_the_rank else text


def _first_difference(group: dist.ProcessGroup, mine: Sequence[Described]) -> str:
    """What the first rank has, and what another one has in its place."""
    return _first_pair(group, [f"has {_told(one)}" for one in mine], f"has {_told(None)}")


def _first_pair(group: dist.ProcessGroup, mine: Sequence[str], nothing: str = "") -> str:
    """The first of the sentences on the first rank that another rank has otherwise, and how that one has it."""
    rows: list[Sequence[str]] = [[]] * group.size()
    dist.all_gather_object(rows, list(mine), group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, rows, strict=True):
        for ours, other in zip_longest(rows[0], theirs, fillvalue=nothing):
            if ours != other:
                return f"rank {ranks[0]} {ours}, rank {rank} {other}"
    return "their digests differ"


def _first_apart(group: dist.ProcessGroup, what: Sequence[str], mine: Samples) -> str:
    """Of what another rank has other values than the first, if it is not rounding alone."""
    rows: list[Samples] = [[]] * group.size()
    dist.all_gather_object(rows, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, rows, strict=True):
        for told, ours, other in zip(what, rows[0], theirs, strict=False):
            if apart := difference(ours, other):
                return f"{told} differs between rank {ranks[0]} and rank {rank}, by up to {apart:.3g}"
    return ""


def _told(described: Described | None) -> str:
    if described is None:
        return "no tensor in its place"
    what, shape, dtype = described
    return what if dtype is None else f"{what} of shape {tuple(shape)} and {dtype}"
