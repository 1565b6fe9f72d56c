"""The collectives beside allreduce, number formats, start-up and what an idle group costs.

    python -m benchmarks.collectives

The same contest as `benchmarks.allreduce`, for broadcast, allgather, reduce_scatter, alltoall and the exchange between
pairs of ranks; KiB is the larger of a rank's two buffers. Below the table: how many elements a second an allreduce of
16-bit numbers sums, compared with fp32, and in brackets what fp32 of as many bytes would come to; what it costs to keep a
call or a message and its statistics; how long four ranks without an interpreter take from before they are started until
their group has had its first round; the processor time of a group that does nothing.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import teams
from benchmarks.allreduce import COLUMNS, RANKS, Contest, contend
from benchmarks.common import Spread, parser, report

OPS = ("broadcast", "allgather", "reduce_scatter", "alltoall", "pair")
SIZES = [1 << 10, 64 << 10, 1 << 20, 25 << 20]
ELEMENTS = [16 << 10, 256 << 10, 6 << 20]
IDLE_SECONDS = 2.0


def formats(team: teams.Team, elements: list[int], repeat: int) -> dict[str, str]:
    """Elements a second of 16-bit types : fp32, for buffers in and outside the segment; beside it what as many bytes of
    fp32 would bring, which is what halving the memory traffic can give."""
    told = {}
    for dtype in ("bf16", "fp16"):
        for place in ("private", "segment"):
            ratios = []
            for number in elements:
                inner = max(1, min(100, (1 << 20) // number))
                rounds = [
                    (
                        team.seconds("allreduce", 4 * number, inner, place),
                        team.seconds("allreduce", 2 * number, inner, place, dtype),
                        team.seconds("allreduce", 2 * number, inner, place),
                    )
                    for _ in range(repeat)
                ]
                ratio = Spread.of([full / half for full, half, _ in rounds]).text(digits=2)
                as_bytes = Spread.of([full / as_long for full, _, as_long in rounds]).median
                ratios.append(f"{number >> 10} Ki {ratio} [{as_bytes:.2f}]")
            told[f"elements a second, {dtype} : fp32, {team.size} ranks, {place}"] = ", ".join(ratios)
    return told


def idle(team: teams.Team) -> str:
    """The share of a core that the busiest rank of a group uses while nothing is asked of it."""
    team.ask("idle")
    time.sleep(IDLE_SECONDS)
    return f"{max(map(float, team.ask('idle'))) / IDLE_SECONDS:.2%} of a core"


def start_up(size: int, repeat: int) -> Spread:
    """Seconds from before `size` processes are started until their group has had its first round."""
    seconds = []
    for _ in range(repeat):
        with teams.floors(size) as team:
            seconds.append(max(map(float, team.greeting)))
    return Spread.of(seconds)


def main() -> None:
    args = parser(__doc__).parse_args()
    sizes = SIZES[:2] if args.quick else SIZES
    elements = ELEMENTS[:1] if args.quick else ELEMENTS
    notes: dict[str, Any] = {}

    def note(contest: Contest, repeat: int) -> None:
        nonlocal notes
        notes |= formats(contest.floors, elements, repeat)
        for op, what in (("record", "call"), ("record_message", "message")):
            kept = Spread.of([contest.floors.seconds(op, 1024, 1000) for _ in range(repeat)])
            notes[f"keeping a {what} of {contest.size} ranks, ns"] = kept.text(1e9)
        notes[f"idle group of {contest.size}, C++ and Python"] = f"{idle(contest.floors)}, {idle(contest.python)}"

    cases = [(op, size, ("private",) if op == "pair" else ("private", "segment")) for op in OPS for size in sizes]
    rows = [row for ranks in RANKS for row in contend(ranks, cases, args, note)]
    repeat = 3 if args.quick else args.repeat
    notes["start-up of 4 ranks, ms"] = start_up(4, repeat).text(1e3)
    report("collectives", rows, COLUMNS, args.out, notes)


if __name__ == "__main__":
    main()
