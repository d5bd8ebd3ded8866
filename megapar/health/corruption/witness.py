"""The record of a fault that a guard has found, so that the next start resumes from a checkpoint before it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megapar.core.checkpoint.shard_file import write_bytes
from megapar.core.comm.world import World
from megapar.errors import CorruptionError, TrainingError
from megapar.files.location import Place, at
from megapar.files.suspects import RECORD, Blamed, Fault


class Witness:
    """Records faults. A failing rank writes only the record, and moves or removes nothing, since it cannot be trusted.

    Args:
        folders: Folders in which the next start looks for the record.
        world: Process groups of all axes.
        began: Last iteration done before this start.

    Attributes:
        hosts: Host of every rank, once known.
        others: Names of checkpoints in the folders that are on other lineages.
    """

    def __init__(self, folders: Sequence[Path], world: World, began: int) -> None:
        self._folders = tuple(folders)
        self._world = world
        self._began = began
        self.hosts: Sequence[str] = ()
        self.others: Collection[str] = ()

    def record(self, check: str, iteration: int, verified: Mapping[str, int], error: TrainingError) -> CorruptionError:
        """Record a fault, unless another rank has. Returns the error to raise, which locates the fault."""
        known = error if isinstance(error, CorruptionError) else CorruptionError(str(error))
        ranks, parameters = known.ranks, known.parameters
        blamed = tuple(self._blamed(rank) for rank in ranks)
        message = " ".join(
            [str(error), *(f"R{str(suspect)[1:]}." for suspect in blamed if suspect.node not in str(error))]
        )
        fault = Fault(
            check, iteration, self._began, dict(verified), blamed, parameters, str(error), tuple(sorted(self.others))
        )
        content = json.dumps(fault.to_json(), indent=1).encode() + b"\n"
        for folder in self._folders:
            try:
                _write_once(folder, content)
            except OSError as failure:
                message += (
                    f" {folder / RECORD} could not be written ({failure}): newer checkpoints may contain the fault."
                )
        return CorruptionError(message, ranks, parameters)

    def _blamed(self, rank: int) -> Blamed:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self._world.grid.world_size))
        number = self._world.launched[rank] % max(1, per_node)
        device = self._world.device
        node = self.hosts[rank] if rank < len(self.hosts) else "unknown"
        return Blamed(rank, node, device.type if device.type == "cpu" else f"{device.type}:{number} ({device.name})")


def _write_once(folder: Place, content: bytes) -> None:
    """Write the record durably, unless another rank has. Raises OSError."""
    aside = at(folder) / f"{RECORD}.tmp-{uuid.uuid4().hex[:12]}"
    try:
        write_bytes(aside, content)
        with suppress(FileExistsError):
            aside.publish(at(folder) / RECORD)
    finally:
        aside.remove()
