"""Rules that make DTensors cut on spatial dims right in every model; importing this installs them."""

from torchtp.dtensor import collectives, new_data, redistribution, rules  # noqa: F401  (enter rows and methods)
from torchtp.dtensor.notice import GatherError, GatherWarning, UncutWarning, strict
from torchtp.dtensor.registry import install_rules
from torchtp.dtensor.spatial import mark

__all__ = ["GatherError", "GatherWarning", "UncutWarning", "mark", "strict"]

install_rules()
