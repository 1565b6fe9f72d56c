"""Ranks that cut one image must call a model alike; whether they do is asked in one message of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtp.digest import digest
from torchtp.samples import Samples, difference, digest_of, samples_of

Described = tuple[str, torch.Size, torch.dtype]  # what it is, its global shape, its dtype

_COMPLAINS, _DATA_RANK, _NUM, _HASH, _VALUES, _NOTE, _WRITTEN, _STRANGER, _WORDS = range(9)

_MOST_OF_A_PARAMETER = 16


class Agreed(NamedTuple):
    """What the ranks said beside what they must agree on."""

    notes: list[int]  # of the ranks of this image
    written: list[int]  # of all ranks that were asked


class Agreement:
    """Compares what the ranks that cut one image are about to do, and raises the same error on all of them.

    The message is a digest; only ranks that disagree send what they have in full.
    """

    def __init__(self, spatial: dist.ProcessGroup, everyone: dist.ProcessGroup, data_rank: int, device_type: str):
        self._spatial = spatial
        self._everyone = everyone
        self._data_rank = data_rank
        self._device_type = device_type

    def check(
        self,
        tensors: Sequence[Described],
        complaint: str = "",
        note: int = 0,
        written: int = 0,
        stranger: str = "",
        *,
        held: Callable[[], Samples] = list,
        everyone: bool = False,
    ) -> Agreed:
        """Raise ValueError on all ranks if one complains or the ranks of an image differ; returns `note` and `written` of all.

        So it does if some ranks alone have a `stranger`, a sentence on a part of the module that is new, and if the samples of
        the tensors that `held` takes, one for each or none, are not those of the other ranks of the image. Collective over
        the spatial group, or over all data ranks too with `everyone`.
        """
        group = self._everyone if everyone else self._spatial
        if _is_alone(group):
            if complaint:
                raise ValueError(complaint)
            return Agreed([note], [written])
        samples = [] if complaint else held()
        mine = _encode(tensors, complaint, note, written, self._data_rank, bool(stranger), digest_of(samples))
        table = self._gather(group, mine)
        if any(row[_COMPLAINS] for row in table):
            raise ValueError(_first_complaint(group, complaint))
        if len({row[_STRANGER] for row in table}) > 1:
            alone = stranger and f"{stranger}, on some ranks alone: change the module alike on all of them"
            raise ValueError(_first_complaint(group, alone))
        keys = [row[_DATA_RANK] for row in table]
        firsts = [table[keys.index(key)] for key in keys]
        if any(row[_NUM : _HASH + 1] != first[_NUM : _HASH + 1] for row, first in zip(table, firsts, strict=True)):
            raise ValueError(
                f"the ranks that cut one image disagree on it: {_first_difference(group, tensors, keys)}; give all of "
                "them images of the same global shape and dtype, and the same other tensors"
            )
        if any(row[_VALUES] != first[_VALUES] for row, first in zip(table, firsts, strict=True)):
            apart = _first_apart(group, [_told(one) for one in tensors], samples, keys)
            if apart:
                raise ValueError(
                    f"the ranks that cut one image hold different ones: {apart}; give all of them the same, by samplers "
                    "and augmentations that go by layout.data_rank and not by the rank, or cut tiles of one image with "
                    "layout.from_tile"
                )
        notes = [row[_NOTE] for row in table if row[_DATA_RANK] == self._data_rank]
        return Agreed(notes, [row[_WRITTEN] for row in table])

    def check_modules(self, tensors: Sequence[Described], complaint: str = "") -> None:
        """Raise ValueError on all ranks of all images if one complains or they have different parameters."""
        if _is_alone(self._everyone):
            if complaint:
                raise ValueError(complaint)
            return
        table = self._gather(self._everyone, _encode(tensors, complaint, 0, 0, self._data_rank))
        if any(row[_COMPLAINS] for row in table):
            raise ValueError(_first_complaint(self._everyone, complaint))
        if any(row[_HASH] != table[0][_HASH] for row in table):
            difference = _first_difference(self._everyone, tensors, [0] * len(table))
            raise ValueError(f"the modules of the ranks differ: {difference}; build the same module on all ranks")

    def check_parameters(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """Raise ValueError on all ranks of all images if some have another value of a parameter than the first. Collective."""
        if _is_alone(self._everyone):
            return
        samples = samples_of(parameters, _MOST_OF_A_PARAMETER)
        mine = _encode([], "", 0, 0, self._data_rank, values=digest_of(samples))
        if len({row[_VALUES] for row in self._gather(self._everyone, mine)}) > 1:
            what = [f"parameter {name!r}" for name in names]
            apart = _first_apart(self._everyone, what, samples, [0] * self._everyone.size())
            if apart:
                raise ValueError(
                    f"the ranks train different models: {apart}; change parameters alike on all ranks: the same optimizer "
                    "and options, the same checkpoint, the same new values"
                )

    def _gather(self, group: dist.ProcessGroup, mine: list[int]) -> list[list[int]]:
        device = torch.device(self._device_type)
        if torch.device("cpu") in group._device_types:  # no device synchronisation
            device = torch.device("cpu")
        rows = torch.empty(group.size() * _WORDS, dtype=torch.int64, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
        gather(rows, torch.tensor(mine, dtype=torch.int64, device=device), group=group)
        return rows.view(-1, _WORDS).tolist()


def _is_alone(group: dist.ProcessGroup) -> bool:
    return group.size() == 1 or dist.get_backend(group) == "fake"


def _encode(
    tensors: Sequence[Described],
    complaint: str,
    note: int,
    written: int,
    data_rank: int,
    has_stranger: bool = False,
    values: int = 0,
) -> list[int]:
    row = [0] * _WORDS
    row[_COMPLAINS] = bool(complaint)
    row[_DATA_RANK] = data_rank
    row[_NUM] = len(tensors)
    row[_HASH] = digest(repr([(what, tuple(shape), str(dtype)) for what, shape, dtype in tensors]).encode())
    row[_VALUES] = values
    row[_NOTE] = note
    row[_WRITTEN] = written
    row[_STRANGER] = has_stranger
    return row


def _first_complaint(group: dist.ProcessGroup, mine: str) -> str:
    """Only when something is wrong already are there messages of any length."""
    complaints: list[str | None] = [None] * group.size()
    dist.all_gather_object(complaints, mine, group=group)
    rank, text = next((rank, text) for rank, text in enumerate(complaints) if text)
    return f"{text} (on rank {dist.get_global_rank(group, rank)})"


def _first_difference(group: dist.ProcessGroup, mine: Sequence[Described], keys: Sequence[int]) -> str:
    """What a rank has, and what another one of the same key has in its place."""
    rows: list[Sequence[Described]] = [[]] * group.size()
    dist.all_gather_object(rows, list(mine), group=group)
    ranks = dist.get_process_group_ranks(group)
    firsts: dict[int, int] = {}
    for rank, theirs in enumerate(rows):
        first = firsts.setdefault(keys[rank], rank)
        for ours, other in zip_longest(rows[first], theirs):
            if ours != other:
                return f"rank {ranks[first]} has {_told(ours)}, rank {ranks[rank]} has {_told(other)}"
    return "their digests differ"


def _first_apart(group: dist.ProcessGroup, what: Sequence[str], mine: Samples, keys: Sequence[int]) -> str:
    """Of what two ranks of the same key have other values, if it is not rounding alone."""
    rows: list[Samples] = [[]] * group.size()
    dist.all_gather_object(rows, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in enumerate(rows):
        first = keys.index(keys[rank])
        for told, ours, other in zip(what, rows[first], theirs, strict=False):
            if apart := difference(ours, other):
                return f"{told} differs between rank {ranks[first]} and rank {ranks[rank]}, by up to {apart:.3g}"
    return ""


def _told(described: Described | None) -> str:
    if described is None:
        return "no tensor in its place"
    what, shape, dtype = described
    return f"{what} of shape {tuple(shape)} and {dtype}"
