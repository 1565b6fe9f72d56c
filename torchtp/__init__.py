"""Train convolutional networks on images cut over several devices, exactly as if there were one."""

import torchtp._compile as _compile
import torchtp._extension  # noqa: F401  (loads _C, which registers the dispatcher ops; refuses it under another torch)
import torchtp.backend as _backend
import torchtp.trace as trace
from torchtp import nn
from torchtp.backend import monitored_barrier
from torchtp.dtensor import GatherError, GatherWarning, UncutWarning, strict
from torchtp.layout import Layout
from torchtp.observe.statistics import Statistics, stats
from torchtp.parallel.leaving import PartWarning
from torchtp.parallel.parallelize import no_sync, parallelize
from torchtp.planning.explaining import explain
from torchtp.planning.explanation import Explanation

_backend.register()
_compile.register()
trace.start()

__all__ = [
    "Explanation",
    "GatherError",
    "GatherWarning",
    "Layout",
    "PartWarning",
    "Statistics",
    "UncutWarning",
    "explain",
    "monitored_barrier",
    "nn",
    "no_sync",
    "parallelize",
    "stats",
    "strict",
    "trace",
]
__version__ = "0.1.0"
