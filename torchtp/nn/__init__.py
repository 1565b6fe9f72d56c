"""Drop-in variants of torch.nn's layers for images that are cut: same constructors, names and state_dicts.

Their forward takes a DTensor cut by a `torchtp.Layout`, or a plain tensor, for the result of torch.nn. Gradients
of their parameters are contributions to the mean over `layout.group`: average them there, by DistributedDataParallel or
`torchtp.parallelize`. Layers of torch.nn work inside `torchtp.parallelize` as they are; these need no such frame, and
pad in every mode without gathering. On plain tensors of one device, without any process group, LayerNorm2d, LayerScale,
depthwise convolutions and depthwise_layer_norm, which is one of them with a LayerNorm2d behind, run torchtp's kernels.
"""

from torchtp.nn.convert import convert
from torchtp.nn.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from torchtp.nn.depthwise_layer_norm import depthwise_layer_norm
from torchtp.nn.layer_scale import LayerScale, layer_scale
from torchtp.nn.linear import Linear
from torchtp.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    LayerNorm2d,
)
from torchtp.nn.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool2d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from torchtp.nn.upsample import Upsample

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LayerNorm2d",
    "LayerScale",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Upsample",
    "convert",
    "depthwise_layer_norm",
    "layer_scale",
]
