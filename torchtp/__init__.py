"""Train convolutional networks on images cut over several devices, exactly as if there were one."""

import torch  # noqa: F401  (its libraries must be there before the extension's)

from torchtp import _C  # noqa: F401  (registers the dispatcher ops)

__version__ = "0.1.0"
