"""Saving and loading a run's state: what the trainer calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from megapar.core.checkpoint import together
from megapar.core.checkpoint.folder import checkpoints, find, iteration_folder, latest, publish, remove_aside
from megapar.core.checkpoint.layout import CheckpointLayout
from megapar.core.checkpoint.layout import parse as parse_layout
from megapar.core.checkpoint.layout import read as read_layout
from megapar.core.checkpoint.owner import Owner
from megapar.core.checkpoint.planner import ShardLoadPlanner, ShardSavePlanner
from megapar.core.checkpoint.shard import Shard
from megapar.core.checkpoint.storage import ShardReader, ShardWriter, Verify
from megapar.core.comm import json_messages as messages
from megapar.core.units import Json
from megapar.errors import CheckpointError

__all__ = [
    "CheckpointLayout",
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
    state: Mapping[str, Shard] | CheckpointError,
    scalars: Mapping[str, Json],
    *,
    layout: Mapping[str, Mapping[str, Json]],
    group: dist.ProcessGroup | None,
    then: Callable[[Path], None] | None = None,
    owner: Owner | None = None,
) -> None:
    """Write a checkpoint; every rank of ``group`` calls it (None: this process alone).

    state: name -> what this rank holds of it; ranks may hold different names. An error says why it can give nothing,
    with which the save fails on all ranks. scalars: JSON values by name; the same on every rank that gives one.
    layout: {"model": facts that a load compares, "grid": axis sizes for people}.

    Written to ``folder``.tmp-... aside, brought to disk, and renamed by one rank when all are done: until this returns
    there is no ``folder`` (or the old one). then: called by that rank once the folder has its name, with it, such as to
    publish it. owner: of the folder's root, on the first rank of ``group``; where it is given, and ``folder`` is there,
    the new one gets another name. Raises CheckpointError on every rank if any rank fails (FolderLostError where the
    owner is none any more); nothing is left but what ``then`` failed on.
    """
    writer = ShardWriter(folder, layout, then, owner)
    failure = state if isinstance(state, CheckpointError) else None
    planner, held = ShardSavePlanner(scalars, failure), {} if isinstance(state, CheckpointError) else dict(state)
    try:
        together.save(f"saving {folder}", held, planner, writer, group)
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
    reader = ShardReader(folder, verify)
    together.load(f"loading {folder}", targets, ShardLoadPlanner(folder, expect_model, ignore), reader, group)
    return reader.scalars


def first_read_layout(folder: Path, group: dist.ProcessGroup | None) -> CheckpointLayout:
    """``read_layout`` as the first rank of ``group`` finds it, on every rank, so that none turns to another folder.

    A shared disk may show ranks different states of it. Raises CheckpointError, on every rank.
    """
    if group is None:
        return read_layout(folder)
    told: Json = None
    if dist.get_rank(group) == 0:
        try:
            told = {"layout": read_layout(folder).to_bytes().decode()}
        except CheckpointError as error:
            told = {"failure": str(error)}
    told = messages.broadcast(told, group)
    if "failure" in told:
        raise CheckpointError(told["failure"])
    return parse_layout(told["layout"].encode())
