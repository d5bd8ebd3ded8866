"""Names of checkpoints and of their files, the latest checkpoint of a folder, and facts in its small files.

    iter_0000100        the checkpoint of iteration 100
    iter_0000100.e3     a second one: the name was taken when the third owner of the folder saved it
    latest              "iter_0000100 3": the name, and the epoch of the owner that published it
    owner/3.latest      the same, written only by that owner

Each checkpoint contains layout.json (``format.layout``), scalars.json (the state of the run except tensors), and a file
of tensors for each rank that wrote any.

The checkpoint published by the owner with the highest epoch is the latest, regardless of which owner wrote ``latest``
last: an owner that was suspended and has lost the folder may still write it. A ``latest`` without an epoch was written
by an old version or by hand, and is followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from megapar.checkpoints.format.faults import suspects
from megapar.files.location import Location, Place, at
from megapar.files.regular_file import UnfitFileError

LAYOUT_FILE = "layout.json"
SCALARS_FILE = "scalars.json"
LATEST = "latest"
OWNERS = "owner"
EPOCH = "[1-9][0-9]{0,15}"
_ASIDE = re.compile(
    r"(?:iter_[0-9]{7,18}(?:\.e[0-9]+)?|latest|tokenizer)\.tmp-[0-9a-f]{12}(?:-e([0-9]+))?(?:\.replaced)?"
)
_NAME = re.compile(rf"iter_([0-9]{{7,18}})(?:\.e({EPOCH}))?")
_LINE = re.compile(rf"({_NAME.pattern})(?: ({EPOCH}))?")
_PART = re.compile(rf"{re.escape(SCALARS_FILE)}|shard-[0-9]+\.safetensors")
_MOST_BYTES = 100
_MOST_LAYOUT_BYTES = 1 << 20
MOST_SCALARS_BYTES = 1 << 26  # they list the data: some 180 bytes per source, for every phase with different data
FOREIGN_FIX = (
    "Convert it to Hugging Face format with Megatron Bridge or the framework's own converter, and pass that folder "
    "with --load-hf."
)
_RANK_FILE = "mp_rank_*/model_optim_rng.pt"
_FOREIGN = (
    ("a DeepSpeed checkpoint", ("*mp_rank_*_model_states.pt", "*/*mp_rank_*_model_states.pt")),
    ("a Megatron-LM checkpoint with a file per rank", (_RANK_FILE, f"*/{_RANK_FILE}")),
    ("a distributed Megatron-LM checkpoint", ("common.pt", "*/common.pt", "*.distcp", "*/*.distcp")),
    ("a Megatron-LM checkpoint folder", ("latest_checkpointed_iteration.txt",)),
)


def shard_name(rank: int) -> str:
    """Return the name of the file of tensors that a rank writes."""
    return f"shard-{rank:05d}.safetensors"


def is_part(name: str) -> bool:
    """Return True if a file of this name is part of a checkpoint, next to its layout."""
    return _PART.fullmatch(name) is not None


def is_of_owner(name: str, epoch: int) -> bool:
    """Return True for a temporary name, unless it is that of a later owner."""
    match = _ASIDE.fullmatch(name)
    return match is not None and int(match[1] or 0) <= epoch


def holds_checkpoints(root: Place) -> bool:
    """Return True if a complete checkpoint is directly below ``root``, of whatever iteration."""
    names = (name for name in names_in(root) if name.startswith("iter_"))
    return any(LAYOUT_FILE in names_in(at(root) / name) for name in names)


def names_in(folder: Place) -> Iterable[str]:
    """Return the names in a folder; none if it cannot be read, which the loader reports."""
    try:
        return at(folder).list()
    except OSError:
        return ()


def iteration_name(iteration: int, epoch: int = 0) -> str:
    """Return the name of a checkpoint; with an epoch if the plain name is taken."""
    return f"iter_{iteration:07d}" + (f".e{epoch}" if epoch else "")


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Return (iteration, epoch in the name or 0), or None if it is not the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def folders_below(root: Place) -> list[str]:
    """Return the folders with checkpoints that are one level below ``root``, sorted; it is often named by mistake."""
    return sorted(str(at(root) / name) for name in names_in(root) if LATEST in names_in(at(root) / name))


def saved_iterations(root: Place) -> list[int]:
    """Return the iterations of the checkpoints in a folder, oldest first."""
    return sorted({parsed[0] for name in names_in(root) if (parsed := parse_checkpoint_name(name))})


def newest_name(root: Place, iteration: int) -> str:
    """Return the name of the newest checkpoint of an iteration; the plain name if there is none."""
    names = map(parse_checkpoint_name, names_in(root))
    return iteration_name(iteration, max((name[1] for name in names if name and name[0] == iteration), default=0))


def read_latest(root: Place) -> tuple[str, int] | None:
    """Return (name of the latest checkpoint under ``root``, epoch), or None if none has been published.

    The checkpoint may not exist. A text that is not a checkpoint's name is returned unchanged, with epoch 0. Raises
    OSError if a file cannot be read.
    """
    text = _read(at(root) / LATEST)
    if text is None:
        return None
    published = _parsed(text)
    if published is None or not published[1]:
        return published or (text.strip(), 0)
    for epoch in sorted(owners_latest(root), reverse=True):
        if epoch <= published[1]:
            break
        newer = _parsed(_read(at(root) / OWNERS / f"{epoch}.{LATEST}") or "")
        if newer is not None:
            return newer
    return published


def owners_latest(root: Place) -> list[int]:
    """Return the epochs of the folder's owners that have published a checkpoint."""
    return _epochs(root, LATEST)


def _epochs(root: Place, suffix: str) -> list[int]:
    names = (at(root) / OWNERS).list()
    return [int(match[1]) for name in names if (match := re.fullmatch(rf"({EPOCH})\.{suffix}", name))]


def epochs_of(root: Place) -> list[int]:
    """Return the epochs of all owners that are still recorded in the folder. Raises OSError if it cannot be read."""
    return _epochs(root, "json")


def _parsed(text: str) -> tuple[str, int] | None:
    match = _LINE.fullmatch(text.strip())
    return None if match is None else (match[1], int(match[4] or 0))


def _read(path: Location) -> str | None:
    """Return the beginning of a regular file, or None if there is none. Folders, pipes and devices are not read."""
    try:
        return path.head(_MOST_BYTES).decode(errors="replace")
    except (FileNotFoundError, UnfitFileError):
        return None


def stored_facts(root: Place, iteration: int | None) -> tuple[Location, dict[str, Any]] | None:
    """Return (folder, the model's facts in ``layout.json``) of an iteration, or of the latest one under ``root``.

    Returns None if they cannot be read; the loader reports the problem with the checkpoint.
    """
    try:
        name = (read_latest(root) or ("", 0))[0] if iteration is None else newest_name(root, iteration)
        if not parse_checkpoint_name(name):
            return None
        folder = at(root) / name
        if iteration is not None and not folder.list():
            folder = suspects(root).get(iteration, folder)
        head = (folder / LAYOUT_FILE).head(_MOST_LAYOUT_BYTES).split(b"\n", 4)
        text = next(line for line in head if line.startswith(b'"model": '))
        facts = json.loads(text.partition(b": ")[2].rstrip(b","))
    except (OSError, ValueError, RecursionError, StopIteration):
        return None
    return (folder, facts) if isinstance(facts, dict) else None


def stored_scalars(folder: Place) -> dict[str, Any]:
    """Return the content of a checkpoint's ``scalars.json``, unverified; {} if it cannot be read."""
    try:
        return (at(folder) / SCALARS_FILE).json(MOST_SCALARS_BYTES)
    except (OSError, ValueError):
        return {}


def stored_schedule(folder: Place) -> dict[str, Any] | None:
    """Return the learning rate schedule of a checkpoint, or None if it has none, such as a converted one.

    A schedule with values other than numbers and strings was not written by a run.
    """
    schedule = stored_scalars(folder).get("schedule")
    if not isinstance(schedule, dict) or not schedule:
        return None
    return schedule if all(isinstance(value, (int, float, str, type(None))) for value in schedule.values()) else None


def foreign_checkpoint(folder: Place) -> str | None:
    """Describe the checkpoint of another framework, of one iteration or several, by names alone; None for others."""
    if LAYOUT_FILE in names_in(folder) or holds_checkpoints(folder):
        return None
    for form, patterns in _FOREIGN:
        if any(any(at(folder).glob(pattern)) for pattern in patterns):
            return form
    return None
