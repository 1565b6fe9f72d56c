"""Train convolutional networks on images cut over several devices, exactly as if there were one."""

__version__ = "0.1.0"
