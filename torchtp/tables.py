"""Plain text as people read it: durations, bytes, meshes, and tables of such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def as_seconds(seconds: float) -> str:
    """A duration as people read it: "1.5 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def as_bytes(number: int) -> str:
    """A number of bytes as people read it: "1.5 MiB"."""
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def as_mesh(mesh: Mapping[str, int]) -> str:
    """A mesh as the command line takes it: "h=2,w=2"."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table whose columns are as wide as their longest cell."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
