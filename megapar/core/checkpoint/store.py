"""Saving and loading the state of a run: the interface of checkpoints to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from megapar.core.checkpoint import collective_io
from megapar.core.checkpoint.folder import checkpoints, find, iteration_folder, latest, publish, remove_aside
from megapar.core.checkpoint.layout import CheckpointLayout
from megapar.core.checkpoint.layout import parse as parse_layout
from megapar.core.checkpoint.layout import read as read_layout
from megapar.core.checkpoint.owner import Owner
from megapar.core.checkpoint.planner import ModelCheck, ShardLoadPlanner, ShardSavePlanner
from megapar.core.checkpoint.shard import Shard
from megapar.core.checkpoint.storage import ShardReader, ShardWriter, Verify
from megapar.core.comm import json_messages as messages
from megapar.core.units import Json
from megapar.errors import CheckpointError
from megapar.files.location import Location, Place, at

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
    folder: Place,
    state: Mapping[str, Shard] | CheckpointError,
    scalars: Mapping[str, Json],
    *,
    layout: Mapping[str, Mapping[str, Json]],
    group: dist.ProcessGroup | None,
    then: Callable[[Location], None] | None = None,
    owner: Owner | None = None,
) -> None:
    """Write a checkpoint. Every rank of ``group`` calls this.

    The ranks write to a temporary folder, ``folder``.tmp-..., and flush it to disk. One rank renames it after all are
    done, so that ``folder`` is always either missing, the old checkpoint or the complete new one.

    Raises CheckpointError on every rank if any rank fails (FolderLostError if the owner has a successor). The temporary
    folder is then removed; if only ``then`` failed, the checkpoint stays.

    Args:
        folder: The final folder.
        state: Tensor name to this rank's shard; ranks may have different names. An error instead of a state makes the
            save fail on all ranks.
        scalars: JSON values by name; a value that several ranks pass must be the same on all of them.
        layout: {"model": facts that a load compares, "grid": axis sizes for the reader}.
        group: The ranks that save; None for this process alone.
        then: Called on the renaming rank with the final folder, for example to publish it.
        owner: Owner of the folder's root, on the first rank of ``group``. With it, an existing ``folder`` is kept, and
            the new checkpoint gets another name.
    """
    folder = at(folder)
    writer = ShardWriter(folder, layout, then, owner)
    failure = state if isinstance(state, CheckpointError) else None
    planner, held = ShardSavePlanner(scalars, failure), {} if isinstance(state, CheckpointError) else dict(state)
    try:
        collective_io.save(f"saving {folder}", held, planner, writer, group)
    except BaseException:
        if group is None or dist.get_rank(group) == 0:
            remove_aside(folder, owner)
        raise


def load(
    folder: Place,
    targets: Mapping[str, Shard],
    *,
    expect_model: ModelCheck | None,
    ignore: Sequence[str] = (),
    verify: Verify = "full",
    group: dist.ProcessGroup | None,
) -> dict[str, Json]:
    """Fill the targets' tensors in place from a checkpoint of any layout (resharding), and return its scalars.

    Every rank of ``group`` calls this. Before the first target is written, all files that any rank needs are verified,
    and every element has a source. Raises CheckpointError, on every rank, for a missing, damaged, incomplete or
    truncated checkpoint and for one with another model, shape, dtype or set of names.

    Args:
        targets: Tensor name to this rank's shard.
        expect_model: Returns what is different from this model, given the facts passed at save, or ""; None skips it.
        ignore: Prefixes of tensor names that may be stored although no rank has a target for them. Otherwise targets
            and checkpoint must name the same tensors.
        verify: The check of the files that this rank needs: size and SHA-256 ("full"), "size", or none ("off").
        group: The ranks that load; None for this process alone.
    """
    reader = ShardReader(folder, verify)
    collective_io.load(f"loading {folder}", targets, ShardLoadPlanner(folder, expect_model, ignore), reader, group)
    return reader.scalars


def first_read_layout(folder: Place, group: dist.ProcessGroup | None) -> CheckpointLayout:
    """Read the layout on the first rank of ``group`` and return it on every rank, so that all choose the same folder.

    A shared disk may show different states to different ranks. Raises CheckpointError, on every rank.
    """
    if group is None:
        return read_layout(folder)
    result: Json = None
    if dist.get_rank(group) == 0:
        try:
            result = {"layout": read_layout(folder).to_bytes().decode()}
        except CheckpointError as error:
            result = {"failure": str(error)}
    result = messages.broadcast(result, group)
    if "failure" in result:
        raise CheckpointError(result["failure"])
    return parse_layout(result["layout"].encode())
