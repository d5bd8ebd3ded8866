"""Detection of packages named ``apex``. megapar uses none of them (docs/devices.md)."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Folders of NVIDIA's package, and of the package for Ascend that is derived from it.
_OPTIMIZERS = ("optimizers", "multi_tensor_apply")


def apex_installed() -> str:
    """Describe the package ``apex`` on this machine without importing it. Returns "" if none is installed."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return ""
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    try:
        name = f"apex {version('apex')}"
    except PackageNotFoundError:
        name = "apex"
    if any((folder / part).is_dir() for folder in folders for part in _OPTIMIZERS):
        return f"{name} is installed and not used: torch has the same fused AdamW and norms (docs/devices.md)"
    return f"{name} is installed, which is not NVIDIA's package but PyPI's of the same name; neither is used"
