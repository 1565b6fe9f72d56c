"""What `import torch` runs where torchtp is installed: the backend's name is known, torchtp is imported when it is used."""

from __future__ import annotations

from typing import Any


def _create(options: Any, backend_options: Any = None) -> Any:
    from torchtp.backend import create

    return create(options, backend_options)


def register() -> None:
    """Register the backend's name with torch.distributed; never raises, since it runs in every process with torch."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "TORCHTP" not in dist.Backend._plugins:
            dist.Backend.register_backend("torchtp", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:
        pass
