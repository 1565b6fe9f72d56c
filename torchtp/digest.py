"""Numbers that tell texts apart, the same in every process."""

from __future__ import annotations

import hashlib


def digest(text: bytes) -> int:
    """63 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
