"""What PyTorch's own tests import before anything else, and nobody who only uses its tests has installed."""

import sys
import types
import unittest


def do_without_expecttest():
    """They take a base class from it; of what is used here none calls its methods."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
