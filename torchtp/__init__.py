"""Train convolutional networks on images cut over several devices, exactly as if there were one."""

import torchtp._extension  # noqa: F401  (loads _C, which registers the dispatcher ops; refuses it under another torch)
from torchtp.dtensor import GatherError, GatherWarning, strict

__all__ = ["GatherError", "GatherWarning", "strict"]
__version__ = "0.1.0"
