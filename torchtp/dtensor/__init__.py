"""Rules that make DTensors cut on spatial dims right in every model; importing this installs them."""

from torchtp.dtensor import (  # noqa: F401  (enter their rows and methods)
    adaptive_max_pool,
    along,
    attention,
    collectives,
    convolution,
    counting,
    deformed,
    distances,
    fallback,
    grid_sample,
    indexing,
    interpolate,
    layer_norm,
    linear,
    local,
    loss,
    making,
    matrices,
    max_pool,
    new_data,
    norm,
    pad,
    pointwise,
    pooling,
    product,
    random,
    recurrent,
    redistribution,
    reduction,
    regions,
    shape,
    slicing,
    softmax,
    unfold,
    view,
)
from torchtp.dtensor.notice import GatherError, GatherWarning, UncutWarning, strict
from torchtp.dtensor.registry import install_rules
from torchtp.dtensor.spatial import mark

__all__ = ["GatherError", "GatherWarning", "UncutWarning", "mark", "strict"]

install_rules()
