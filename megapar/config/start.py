"""What ranks need to start, as far as it can be known without torch: each other, a device, a folder of their own.

Only the folder is the same wherever the question is asked.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar.config.files import saved_steps
from megapar.config.latest_name import newest_of, of_name, read_latest
from megapar.config.launched import job_id, starts_before
from megapar.config.regular_file import read_regular
from megapar.config.stored import MAX_BYTES
from megapar.errors import Complaint


def check_start(environ: Mapping[str, str], values: Mapping[str, Any]) -> list[Complaint]:
    """What a rank with this environment would miss on this machine, or do harm to."""
    device = [*_check_device(str(values.get("device"))), *_check_fp8(values)]
    return [*_check_numbers(environ), *_check_meeting(environ), *device]


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


def _check_fp8(values: Mapping[str, Any]) -> list[Complaint]:
    """Of a device that is asked for by name a rule row or ``_check_device`` speaks."""
    if not values.get("fp8") or values.get("device") != "auto" or not (reason := no_device("cuda")):
        return []
    message = f"--fp8 needs an NVIDIA GPU of compute capability 8.9 or more, but {reason} on this machine."
    return [Complaint("device", message, "Leave --fp8 out.")]


def _loads(library: str) -> bool:
    """Opened, not asked for devices: a process that has asked the driver cannot fork."""
    import ctypes  # only where a GPU is asked for: others start without waiting for it

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_save(environ: Mapping[str, str], values: Mapping[str, Any]) -> list[Complaint]:
    """A run from elsewhere would write over another one's checkpoints; a restarted job finds its own."""
    load, save = values.get("load"), values.get("save")
    if save is None or (load is not None and Path(load) == Path(save)):
        return []
    saved = saved_steps(Path(save))
    unnamed_restart = starts_before(environ) and not job_id(environ)  # whose they are is not to be known
    if not saved or unnamed_restart or _saved_by(environ, _best(Path(save), saved[-1])):
        return []
    message = f"--save {save} holds checkpoints of another run, up to iteration {saved[-1]}."
    return [Complaint("checkpoint", message, f"Go on from them by --load {save}, or give another folder.")]


def _best(save: Path, last: int) -> Path:
    """The checkpoint that a run would go on from: what is called the latest, else the last one's newest."""
    try:
        latest = read_latest(save)
    except OSError:
        latest = None
    named = latest is not None and of_name(latest[0]) is not None and (save / latest[0]).is_dir()
    return save / (latest[0] if latest is not None and named else newest_of(save, last))


def _saved_by(environ: Mapping[str, str], folder: Path) -> bool:
    """Whether this very job has saved a checkpoint."""
    try:
        saved = json.loads(read_regular(folder / "scalars.json", MAX_BYTES)).get("job")
    except (OSError, ValueError, RecursionError, AttributeError):
        return False
    return bool(job_id(environ)) and saved == job_id(environ)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _check_numbers(environ: Mapping[str, str]) -> list[Complaint]:
    """A rank's numbers are numbers, and below the number of ranks."""
    found = []
    for name in ("RANK", "LOCAL_RANK"):
        if not _is_number(environ.get(name) or "0"):
            found.append(Complaint("environment", f"{name} is {environ[name]!r}, not the number of a rank."))
    size = environ.get("WORLD_SIZE") or "1"
    if not found and _is_number(size) and int(size) > 1 and int(environ.get("RANK") or 0) >= int(size):
        message = f"RANK is {environ['RANK']} and WORLD_SIZE {size}: ranks count from 0 to {int(size) - 1}."
        found.append(Complaint("environment", message, "Start them with megapar launch or torchrun, which set both."))
    return found


def _check_meeting(environ: Mapping[str, str]) -> list[Complaint]:
    """Several ranks meet as torchrun's variables say."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    size = environ.get("WORLD_SIZE", "1")
    if not missing or size == "1" or not _is_number(size):  # the parser speaks of what is no number
        return []
    verb = "is" if len(missing) == 1 else "are"
    message = f"WORLD_SIZE is {size}, but {' and '.join(missing)} {verb} not set, by which ranks find each other."
    fix = "Start them with megapar launch or torchrun, which set them; for one process, unset WORLD_SIZE."
    return [Complaint("environment", message, fix)]
