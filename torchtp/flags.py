"""What the flags of programs take, for argparse."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """A number of ranks, steps or repetitions; ArgumentTypeError for what is no whole number from 1 on."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"it is a whole number from 1 on, not {text!r}")
    return number
