"""Saving and loading a run's state: what the trainer calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megapar.core.checkpoint.folder import checkpoints, find, iteration_folder, latest, publish, remove_aside
from megapar.core.checkpoint.layout import Layout
from megapar.core.checkpoint.layout import read as read_layout
from megapar.core.checkpoint.owner import Owner
from megapar.core.checkpoint.planner import ShardLoadPlanner, ShardSavePlanner
from megapar.core.checkpoint.shard import Shard
from megapar.core.checkpoint.storage import ShardReader, ShardWriter, Verify
from megapar.core.checkpoint.tiling import Json
from megapar.errors import CheckpointError, CheckpointMismatchError, DistributedError, FolderLostError

__all__ = [
    "Layout",
    "Shard",
    "Verify",
    "checkpoints",
    "find",
    "first_read_layout",
    "iteration_folder",
    "latest",
    "load",
    "publish",
    "read_layout",
    "save",
]


def save(
    folder: Path,
    state: Mapping[str, Shard],
    scalars: Mapping[str, Json],
    *,
    layout: Mapping[str, Mapping[str, Json]],
    group: dist.ProcessGroup | None,
    then: Callable[[Path], None] | None = None,
    owner: Owner | None = None,
) -> None:
    """Write a checkpoint; every rank of ``group`` calls it (None: this process alone).

    state: name -> what this rank holds of it; ranks may hold different names. scalars: JSON values by name; the same
    on every rank that gives one. layout: {"model": facts that a load compares, "grid": axis sizes for people}.

    Written to ``folder``.tmp-... aside, brought to disk, and renamed by one rank when all are done: until this returns
    there is no ``folder`` (or the old one). then: called by that rank once the folder has its name, with it, such as to
    publish it. owner: of the folder's root, on the first rank of ``group``; where it is given, and ``folder`` is there,
    the new one gets another name. Raises CheckpointError on every rank if any rank fails (FolderLostError where the
    owner is none any more); nothing is left but what ``then`` failed on.
    """
    writer = ShardWriter(folder, layout, then, owner)
    planner = ShardSavePlanner(scalars)
    try:
        _collectively(
            f"saving {folder}",
            lambda: dcp.save(
                dict(state), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
            ),
            group,
        )
    except BaseException:
        if group is None or dist.get_rank(group) == 0:
            remove_aside(folder, owner)
        raise


def load(
    folder: Path,
    targets: Mapping[str, Shard],
    *,
    expect_model: Mapping[str, Json] | None,
    ignore: Sequence[str] = (),
    verify: Verify = "full",
    group: dist.ProcessGroup | None,
) -> dict[str, Json]:
    """Fill the targets' tensors in place from a checkpoint of any layout, and return its scalars.

    Every rank of ``group`` calls it (None: this process alone).

    expect_model: facts that must equal those given at save (None: not compared). ignore: prefixes of tensor names that
    may be stored without any rank asking for them; otherwise targets and checkpoint must name the same tensors.
    verify: check size and SHA-256 ("full"), size, or nothing ("off") of the files this rank needs.

    All files that any rank needs are verified and every element is accounted for before the first target is touched.
    Raises CheckpointError, on every rank, for a missing, damaged, incomplete or truncated checkpoint and for one of
    another model, shape, dtype or set of names.
    """
    planner = ShardLoadPlanner(folder, expect_model, ignore)
    reader = ShardReader(folder, verify)
    _collectively(
        f"loading {folder}",
        lambda: dcp.load(
            dict(targets), storage_reader=reader, planner=planner, process_group=group, no_dist=group is None
        ),
        group,
    )
    return reader.scalars


def first_read_layout(folder: Path, group: dist.ProcessGroup | None) -> Layout:
    """``read_layout`` as the first rank of ``group`` finds it, on every rank, so that none turns to another folder.

    A shared disk may show ranks different states of it. Raises CheckpointError, on every rank.
    """
    if group is None:
        return read_layout(folder)
    box: list[Layout | CheckpointError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            box = [read_layout(folder)]
        except CheckpointError as error:
            box = [error]
    dist.broadcast_object_list(box, group=group, group_src=0)
    found = box[0]
    if isinstance(found, CheckpointError):
        raise found
    assert found is not None
    return found


def _collectively(what: str, call: Callable[[], object], group: dist.ProcessGroup | None) -> None:
    """Run a DCP operation; failures of any rank become one CheckpointError with all of them, on every rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call()
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        for failure in failures.values():
            if not isinstance(failure, Exception):
                raise failure from None  # an interrupt, not a failure
        kind = CheckpointError
        if any(isinstance(failure, FolderLostError) for failure in failures.values()):
            kind = FolderLostError
        if any(isinstance(failure, CheckpointMismatchError) for failure in failures.values()):
            kind = CheckpointMismatchError
        expected = all(isinstance(failure, CheckpointError | OSError) for failure in failures.values())
        raise kind(_told(what, failures, group)) from (None if expected else error)
    except RuntimeError as error:  # a rank is gone, and the group with it
        raise DistributedError(f"{what}: {error}") from error


def _told(what: str, failures: Mapping[int, BaseException], group: dist.ProcessGroup | None) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        known = isinstance(failure, CheckpointError)
        text = str(failure) if known else f"{what}: {type(failure).__name__}: {failure}"
        ranks.setdefault(text, []).append(rank)
    if group is None:
        return "; ".join(ranks)
    count = dist.get_world_size(group)
    return "; ".join(
        text if len(where) == count else f"{text} (ranks {_short(where)})" for text, where in ranks.items()
    )


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
