"""Which package named ``apex`` is installed. None is used (docs/devices.md)."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Folders of NVIDIA's package, and of the vendor's for Ascend, which is made from it.
_OPTIMIZERS = ("optimizers", "multi_tensor_apply")


def apex_installed() -> str:
    """What is to be said of a package ``apex`` on this machine, found without importing it; "" where there is none."""
    found = importlib.util.find_spec("apex")
    if found is None:
        return ""
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    try:
        name = f"apex {version('apex')}"
    except PackageNotFoundError:
        name = "apex"
    if any((folder / part).is_dir() for folder in folders for part in _OPTIMIZERS):
        return f"{name} is installed and not used: torch's fused AdamW and norms are what it has (docs/devices.md)"
    return f"{name} is installed, which is not NVIDIA's package of that name but PyPI's; neither is used"
