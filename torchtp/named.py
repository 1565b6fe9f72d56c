"""Networks that a command line names: "torchvision.models:resnet50"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch


def made(network: str, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """The module that "package.module:callable" is, or what it makes of the arguments; ValueError where there is none."""
    path, colon, name = network.partition(":")
    if not colon or not path or not name:
        raise ValueError(
            f"a network is given as package.module:callable, as torchvision.models:resnet50, not {network!r}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does: networks of the folder one is in
    try:
        found: Any = importlib.import_module(path)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{network} is not there: {error}") from error
    except Exception as error:  # of the author of what is imported
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if arguments and isinstance(found, torch.nn.Module):
        raise ValueError(
            f"{network} is a torch.nn.Module already, which nothing is called for: leave the arguments out"
        )
    if callable(found) and not isinstance(found, torch.nn.Module):
        try:
            found = found(**arguments)
        except Exception as error:  # of the network's author, whatever it is
            raise ValueError(f"{network} makes no network: {type(error).__name__}: {error}") from error
    if not isinstance(found, torch.nn.Module):
        raise ValueError(f"{network} is or makes a {type(found).__name__}, not a torch.nn.Module")
    return found
