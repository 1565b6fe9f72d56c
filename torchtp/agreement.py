"""Ranks that cut one image must call a model alike; whether they do is asked in one message of fixed size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

Described = tuple[str, torch.Size, torch.dtype]  # what it is, its global shape, its dtype

_COMPLAINS, _DATA_RANK, _NUM, _HASH, _NOTE, _WRITTEN, _STRANGER, _WORDS = range(8)


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
        everyone: bool = False,
    ) -> Agreed:
        """Raise ValueError on all ranks if one complains or the ranks of an image differ; returns `note` and `written` of all.

        So it does if some ranks alone have a `stranger`, a sentence on a part of the module that is new. Collective over the spatial group, or over all data ranks too with `everyone`.
        """
        group = self._everyone if everyone else self._spatial
        if group.size() == 1 or dist.get_backend(group) == "fake":
            if complaint:
                raise ValueError(complaint)
            return Agreed([note], [written])
        table = self._gather(group, _encode(tensors, complaint, note, written, self._data_rank, bool(stranger)))
        if any(row[_COMPLAINS] for row in table):
            raise ValueError(_first_complaint(group, complaint))
        if len({row[_STRANGER] for row in table}) > 1:
            alone = stranger and f"{stranger}, on some ranks alone: change the module alike on all of them"
            raise ValueError(_first_complaint(group, alone))
        keys = [row[_DATA_RANK] for row in table]
        if any(row[_NUM:_NOTE] != table[keys.index(row[_DATA_RANK])][_NUM:_NOTE] for row in table):
            raise ValueError(
                f"the ranks that cut one image disagree on it: {_first_difference(group, tensors, keys)}; give all of "
                "them images of the same global shape and dtype, and the same other tensors"
            )
        notes = [row[_NOTE] for row in table if row[_DATA_RANK] == self._data_rank]
        return Agreed(notes, [row[_WRITTEN] for row in table])

    def check_modules(self, tensors: Sequence[Described], complaint: str = "") -> None:
        """Raise ValueError on all ranks of all images if one complains or they have different parameters."""
        if self._everyone.size() == 1 or dist.get_backend(self._everyone) == "fake":
            if complaint:
                raise ValueError(complaint)
            return
        table = self._gather(self._everyone, _encode(tensors, complaint, 0, 0, self._data_rank))
        if any(row[_COMPLAINS] for row in table):
            raise ValueError(_first_complaint(self._everyone, complaint))
        if any(row[_HASH] != table[0][_HASH] for row in table):
            difference = _first_difference(self._everyone, tensors, [0] * len(table))
            raise ValueError(f"the modules of the ranks differ: {difference}; build the same module on all ranks")

    def _gather(self, group: dist.ProcessGroup, mine: list[int]) -> list[list[int]]:
        device = torch.device(self._device_type)
        if torch.device("cpu") in group._device_types:  # no device synchronisation
            device = torch.device("cpu")
        rows = torch.empty(group.size() * _WORDS, dtype=torch.int64, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
        gather(rows, torch.tensor(mine, dtype=torch.int64, device=device), group=group)
        return rows.view(-1, _WORDS).tolist()


def digest(text: bytes) -> int:
    """63 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _encode(
    tensors: Sequence[Described], complaint: str, note: int, written: int, data_rank: int, has_stranger: bool = False
) -> list[int]:
    row = [0] * _WORDS
    row[_COMPLAINS] = bool(complaint)
    row[_DATA_RANK] = data_rank
    row[_NUM] = len(tensors)
    row[_HASH] = digest(repr([(what, tuple(shape), str(dtype)) for what, shape, dtype in tensors]).encode())
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


def _told(described: Described | None) -> str:
    if described is None:
        return "no tensor in its place"
    what, shape, dtype = described
    return f"{what} of shape {tuple(shape)} and {dtype}"
