"""Messages of one process group that found no partner: the sends of each rank beside the receives of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtp.observe.recorded import RankTrace

Message = dict[str, Any]


def of(ranks: Mapping[int, RankTrace], members: tuple[int, ...]) -> list[str]:
    """A line for each receive that nobody sent, each send that nobody asked for, and each pair of unequal sizes.

    A message that is under way between two ranks is no finding, nor is one that its sender has handed over and nobody has
    asked for yet. Ranks without a trace are taken to have done their part. `ranks` go by their number in the group, whose
    global ranks `members` are: by these they are told.
    """
    return [line for rank in sorted(ranks) for line in _of_rank(rank, ranks, members)]


def _of_rank(rank: int, ranks: Mapping[int, RankTrace], members: tuple[int, ...]) -> Iterator[str]:
    mine = ranks[rank]
    sent: dict[tuple[int, int], list[Message]] = {}  # to this rank, by peer and tag
    asked: dict[tuple[int, int], list[Message]] = {}  # of this rank
    for message in mine.messages:
        if message["state"] == "done":
            continue
        peers = [message["peer"]] if message["peer"] >= 0 else [peer for peer in ranks if peer != rank]
        if any(peer not in ranks for peer in peers) or (message["peer"] < 0 and len(ranks) < mine.size):
            continue
        sends = message["op"] == "send"
        found = None
        partners = asked if sends else sent
        for peer in peers:
            key = (peer, message["tag"])
            if key not in partners:
                partners[key] = _asked(ranks[peer], rank, key[1]) if sends else _sent(ranks[peer], mine, key[1])
            if partners[key]:
                found = partners[key].pop(0)
                break
        if found is None:
            yield f"{_told(mine, message, members)}: {_lack(message, peers, rank, ranks, members)}"
        elif found["bytes"] != message["bytes"]:
            verb = "asked for" if sends else "sent"
            yield f"{_told(mine, message, members)}: rank {members[peer]} {verb} {found['bytes']:,} bytes"


def _sent(sender: RankTrace, receiver: RankTrace, tag: int) -> list[Message]:
    """What `sender` has sent with that tag and `receiver` has not got, oldest first. In a tag order is kept."""
    sends = [one for one in sender.messages if _is(one, "send", receiver.rank, tag)]
    got = [one for one in receiver.messages if _is(one, "recv", sender.rank, tag) and one["state"] == "done"]
    if all(one["number"] >= 0 for one in got):
        last = max((one["number"] for one in got), default=0)
        return [one for one in sends if one["state"] != "done" or one["number"] > last]
    return sends[len(got) :]  # between hosts messages carry no numbers


def _asked(receiver: RankTrace, sender: int, tag: int) -> list[Message]:
    """The receives that `receiver` has posted and that a message of `sender` with that tag could be for."""
    return [
        one
        for one in receiver.messages
        if one["state"] != "done" and one["op"] != "send" and one["tag"] == tag and one["peer"] in (sender, -1)
    ]


def _is(message: Message, op: str, peer: int, tag: int) -> bool:
    return (message["op"] == "send") == (op == "send") and message["peer"] == peer and message["tag"] == tag


def _told(trace: RankTrace, message: Message, members: tuple[int, ...]) -> str:
    since = ""
    if message["state"] == "running":
        since = f" for {(trace.now_ns - message['called_ns']) * 1e-9:.1f} s"
    return f"rank {trace.global_rank}: {describe(message, members)}, {message['state']}{since}"


def _lack(
    message: Message, peers: list[int], rank: int, ranks: Mapping[int, RankTrace], members: tuple[int, ...]
) -> str:
    if message["op"] != "send" and len(peers) != 1:
        return "nobody has sent it"
    peer, sends = peers[0], message["op"] == "send"
    opposite = "recv" if sends else "send"
    before = [one for one in ranks[peer].messages if (one["op"] == "send") != sends and one["peer"] in (rank, -1)]
    if not before:
        verb = "asked it for" if sends else "sent it"
        return f"rank {members[peer]} has {verb} nothing"
    what = "has not asked for it" if sends else "has not sent it"
    last = describe(before[-1], members)
    return f"rank {members[peer]} {what}; its last {opposite} was {last}, {before[-1]['state']}"


def describe(message: Message, members: tuple[int, ...]) -> str:
    """A message in words: "recv(Float, 4 elements, tag 7) from rank 2"; `members` are the group's global ranks."""
    peer = f"rank {members[message['peer']]}" if message["peer"] >= 0 else "any rank"
    name, way = ("send", "to") if message["op"] == "send" else ("recv", "from")
    return f"{name}({message['dtype']}, {message['elements']:,} elements, tag {message['tag']}) {way} {peer}"
