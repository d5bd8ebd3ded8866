"""Saves and loads over all ranks: DCP's protocol with JSON messages, because DCP itself sends pickles.

    every rank      plan --------+               its part ------+
    first rank                   +-> assignment                 +-> finish

Each rank plans, the first rank collects all plans and returns an assignment to each, and each rank does its part. A
failure on any rank fails on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megapar.core.box import Box
from megapar.core.checkpoint.layout import DTYPE_NAMES, DTYPES, FileEntry
from megapar.core.checkpoint.planner import Declared, ShardLoadPlanner, ShardSavePlanner
from megapar.core.checkpoint.shard import Shard
from megapar.core.checkpoint.storage import ShardReader, ShardWriter, WriterInfo, WrittenPiece
from megapar.core.comm import json_messages as messages
from megapar.core.units import Json
from megapar.errors import CheckpointError, CheckpointMismatchError, DistributedError, FolderLostError


def save(
    what: str,
    state: Mapping[str, Shard],
    planner: ShardSavePlanner,
    writer: ShardWriter,
    group: dist.ProcessGroup | None,
) -> None:
    """Write every rank's part of a checkpoint. Every rank of ``group`` calls this.

    Raises CheckpointError on every rank if one of them fails, and DistributedError if a rank has died.

    Args:
        what: The operation, such as "saving runs/a"; the start of error messages.
        state: Tensor name to this rank's shard.
        writer: Writer of this save.
        group: The ranks that save; None for this process alone.
    """
    collected: list[Metadata] = []

    def plan() -> Json:
        planner.set_up_planner(dict(state))
        return _plan_to_json(writer.prepare_local_plan(planner.create_local_plan()))

    def assign(received: list[Json]) -> list[Json]:
        plans, metadata = planner.create_global_plan([_plan_from_json(value) for value in received])
        collected.append(metadata)
        return [_assignment_to_json(assigned) for assigned in writer.prepare_global_plan(plans)]

    def write(assigned: Json) -> Json:
        done = writer.write_data(planner.finish_plan(_assignment_from_json(assigned)), planner)
        return [_result_to_json(result) for result in done.value()]

    def finish(received: list[Json]) -> list[Json]:
        writer.finish(collected[0], [[_result_from_json(result) for result in results] for results in received])
        return [None] * len(received)

    mine = _step(what, plan, assign, group)
    _step(what, lambda: write(mine), finish, group)


def load(
    what: str,
    targets: Mapping[str, Shard],
    planner: ShardLoadPlanner,
    reader: ShardReader,
    group: dist.ProcessGroup | None,
) -> None:
    """Read every rank's part, after all ranks have verified theirs. Called and raises like ``save``."""

    def plan() -> Json:
        planner.set_up_planner(dict(targets))
        names: Json = reader.prepare_local_plan(planner.create_local_plan()).planner_data
        return names

    def check(received: list[Json]) -> list[Json]:
        planner.create_global_plan([LoadPlan([], planner_data=names) for names in received])
        return [None] * len(received)

    def read() -> Json:
        reader.read_data(planner.finish_plan(LoadPlan([])), planner)
        return None

    _step(what, plan, check, group)
    _step(what, read, lambda received: [None] * len(received), group)


def _step(
    what: str,
    act: Callable[[], Json],
    answer: Callable[[list[Json]], list[Json]],
    group: dist.ProcessGroup | None,
) -> Json:
    """Call ``act`` on every rank and ``answer`` on the first with all results. Return this rank's answer."""
    own: BaseException | None = None
    message: dict[str, Json]
    try:
        message = {"value": act()}
    except BaseException as error:
        own, message = error, {"failure": _failure_to_json(what, error)}
    try:
        everyone = [message] if group is None else messages.gather(message, group)
        answers: list[Json] | None = None
        if everyone is not None:
            failures = {rank: reply["failure"] for rank, reply in enumerate(everyone) if "failure" in reply}
            try:
                answers = [] if failures else [{"value": part} for part in answer([each["value"] for each in everyone])]
            except BaseException as error:
                own, failures = error, {0: _failure_to_json(what, error)}
            if failures:
                answers = [{"failures": list(failures.items())}] * len(everyone)
        if group is None:
            assert answers is not None  # this process is the only one, and has answered
            reply = answers[0]
        else:
            reply = messages.scatter(answers, group)
    except RuntimeError as error:  # a rank has died, and the group with it
        raise DistributedError(f"{what}: {error}") from error
    if "failures" not in reply:
        return reply["value"]
    raise _merged_error(reply["failures"], own, 1 if group is None else dist.get_world_size(group))


def _failure_to_json(what: str, error: BaseException) -> Json:
    """Return the description of an error for the other ranks.

    An "expected" error needs no traceback. An "interrupt" is not a failure of the checkpoint.
    """
    known = isinstance(error, CheckpointError)
    return {
        "text": str(error) if known else f"{what}: {type(error).__name__}: {error}",
        "mismatch": isinstance(error, CheckpointMismatchError),
        "lost": isinstance(error, FolderLostError),
        "expected": known or isinstance(error, OSError),
        "interrupt": not isinstance(error, Exception),
    }


def _merged_error(failures: Sequence[Sequence[Any]], own: BaseException | None, count: int) -> BaseException:
    """Return one error for the failures of all ranks.

    Args:
        failures: (rank, failure as JSON) of each failed rank.
        own: The error on this rank.
        count: The number of ranks.
    """
    if own is not None and not isinstance(own, Exception):
        return own
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures:
        ranks.setdefault(failure["text"], []).append(rank)
    text = "; ".join(
        text if len(failed) == count else f"{text} (ranks {_short(failed)})" for text, failed in ranks.items()
    )
    reasons = [failure for _, failure in failures]
    if any(failure["interrupt"] for failure in reasons):
        return DistributedError(text)
    kind = CheckpointError
    if any(failure["lost"] for failure in reasons):
        kind = FolderLostError
    if any(failure["mismatch"] for failure in reasons):
        kind = CheckpointMismatchError
    merged = kind(text)
    merged.__cause__ = None if all(failure["expected"] for failure in reasons) else own
    return merged


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _plan_to_json(plan: SavePlan) -> Json:
    declared: Declared = plan.planner_data
    return {
        "items": [_item_to_json(item) for item in plan.items],
        "tensors": {name: [list(shape), DTYPE_NAMES[dtype]] for name, (shape, dtype) in declared.tensors.items()},
        "scalars": dict(declared.scalars),
    }


def _plan_from_json(value: Json) -> SavePlan:
    tensors = {name: (tuple(shape), DTYPES[dtype]) for name, (shape, dtype) in value["tensors"].items()}
    declared = Declared(tensors, value["scalars"])
    return SavePlan([_item_from_json(item) for item in value["items"]], planner_data=declared)


def _assignment_to_json(plan: SavePlan) -> Json:
    place: WriterInfo = plan.storage_data
    return {"items": [_item_to_json(item) for item in plan.items], "folder": place.folder, "rank": place.rank}


def _assignment_from_json(value: Json) -> SavePlan:
    place = WriterInfo(value["folder"], value["rank"])
    return SavePlan([_item_from_json(item) for item in value["items"]], storage_data=place)


def _item_to_json(item: WriteItem) -> Json:
    data = item.tensor_data
    assert data is not None, "Shards write tensors only"
    chunk = data.chunk
    return [item.index.fqn, list(chunk.offsets), list(chunk.sizes), DTYPE_NAMES[data.properties.dtype], list(data.size)]


def _item_from_json(value: Json) -> WriteItem:
    name, offsets, sizes, dtype, shape = value
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def _result_to_json(result: WriteResult) -> Json:
    stored: WrittenPiece = result.storage_data
    return [
        *(result.index.fqn, result.size_in_bytes, stored.file.to_json()),
        *(list(stored.box.offsets), list(stored.box.sizes)),
    ]


def _result_from_json(value: Json) -> WriteResult:
    name, size, (file, file_size, sha256), offsets, sizes = value
    stored = WrittenPiece(FileEntry(file, file_size, sha256), Box(tuple(offsets), tuple(sizes)))
    return WriteResult(MetadataIndex(name, torch.Size(offsets)), size, stored)
