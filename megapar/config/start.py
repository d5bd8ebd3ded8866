"""What ranks need to start, as far as it can be known without torch: each other, and their device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from megapar.errors import Complaint


def check_start(environ: Mapping[str, str], device: str) -> list[Complaint]:
    """What a rank with this environment would miss on this machine."""
    return [*_check_meeting(environ), *_check_device(device)]


def no_device(kind: str) -> str:
    """Why this machine has no device of this kind (cpu, cuda or npu); empty where torch has to be asked."""
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    # torch opens this library by this name; AMD's devices, which torch calls cuda as well, have another driver.
    if kind == "cuda" and sys.platform == "linux" and not Path("/dev/kfd").exists() and not _loads("libcuda.so.1"):
        return "there is no driver of a GPU (libcuda.so.1)"
    return ""


def _check_device(kind: str) -> list[Complaint]:
    reason = no_device(kind)
    message = f"--device {kind}, but {reason} on this machine."
    return [Complaint("device", message, "Use --device cpu or auto.")] if reason else []


def _loads(library: str) -> bool:
    """Opened, not asked for devices: a process that has asked the driver cannot fork."""
    import ctypes  # only where a GPU is asked for: others start without waiting for it

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _check_meeting(environ: Mapping[str, str]) -> list[Complaint]:
    """Several ranks meet as torchrun's variables say."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if not missing or environ.get("WORLD_SIZE", "1") == "1":
        return []
    verb = "is" if len(missing) == 1 else "are"
    message = (
        f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {' and '.join(missing)} {verb} not set, by which ranks find "
        "each other."
    )
    fix = "Start them with megapar launch or torchrun, which set them; for one process, unset WORLD_SIZE."
    return [Complaint("environment", message, fix)]
