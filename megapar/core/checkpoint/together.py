"""The steps of a save and of a load over all ranks, as DCP takes them, in JSON: DCP itself sends pickles.

Each rank plans, the first one hears all plans and answers each, and each does its part. What fails on any rank fails
on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
    """Every rank of ``group`` writes its part (None: this process alone). what: begins messages.

    Raises CheckpointError, on every rank; DistributedError where a rank is gone.
    """
    found: list[Metadata] = []

    def plan() -> Json:
        planner.set_up_planner(dict(state))
        return _plan_to_json(writer.prepare_local_plan(planner.create_local_plan()))

    def share(told: list[Json]) -> list[Json]:
        plans, metadata = planner.create_global_plan([_plan_from_json(one) for one in told])
        found.append(metadata)
        return [_share_to_json(one) for one in writer.prepare_global_plan(plans)]

    def write(told: Json) -> Json:
        done = writer.write_data(planner.finish_plan(_share_from_json(told)), planner)
        return [_result_to_json(result) for result in done.value()]

    def finish(told: list[Json]) -> list[Json]:
        writer.finish(found[0], [[_result_from_json(result) for result in results] for results in told])
        return [None] * len(told)

    mine = _step(what, plan, share, group)
    _step(what, lambda: write(mine), finish, group)


def load(
    what: str,
    targets: Mapping[str, Shard],
    planner: ShardLoadPlanner,
    reader: ShardReader,
    group: dist.ProcessGroup | None,
) -> None:
    """Every rank of ``group`` reads its part, once all of them have found theirs sound. Raises as ``save``."""

    def plan() -> Json:
        planner.set_up_planner(dict(targets))
        names: Json = reader.prepare_local_plan(planner.create_local_plan()).planner_data
        return names

    def check(told: list[Json]) -> list[Json]:
        planner.create_global_plan([LoadPlan([], planner_data=names) for names in told])
        return [None] * len(told)

    def read() -> Json:
        reader.read_data(planner.finish_plan(LoadPlan([])), planner)
        return None

    _step(what, plan, check, group)
    _step(what, read, lambda told: [None] * len(told), group)


def _step(
    what: str,
    act: Callable[[], Json],
    answer: Callable[[list[Json]], list[Json]],
    group: dist.ProcessGroup | None,
) -> Json:
    """``act`` on every rank, ``answer`` on the first one with what they returned; this rank's part of that."""
    own: BaseException | None = None
    message: dict[str, Json]
    try:
        message = {"value": act()}
    except BaseException as error:
        own, message = error, {"failure": _told(what, error)}
    try:
        everyone = [message] if group is None else messages.gather(message, group)
        answers: list[Json] | None = None
        if everyone is not None:
            failures = {rank: said["failure"] for rank, said in enumerate(everyone) if "failure" in said}
            try:
                answers = [] if failures else [{"value": part} for part in answer([one["value"] for one in everyone])]
            except BaseException as error:
                own, failures = error, {0: _told(what, error)}
            if failures:
                answers = [{"failures": list(failures.items())}] * len(everyone)
        told = answers[0] if group is None and answers else messages.scatter(answers, group)  # type: ignore[arg-type]
    except RuntimeError as error:  # a rank is gone, and the group with it
        raise DistributedError(f"{what}: {error}") from error
    if "failures" not in told:
        return told["value"]
    raise _failure(told["failures"], own, 1 if group is None else dist.get_world_size(group))


def _told(what: str, error: BaseException) -> Json:
    """What other ranks hear of an error. expected: it says all there is to say; an interrupt is no failure."""
    known = isinstance(error, CheckpointError)
    return {
        "text": str(error) if known else f"{what}: {type(error).__name__}: {error}",
        "mismatch": isinstance(error, CheckpointMismatchError),
        "lost": isinstance(error, FolderLostError),
        "expected": known or isinstance(error, OSError),
        "interrupt": not isinstance(error, Exception),
    }


def _failure(failures: Sequence[Sequence[Any]], own: BaseException | None, count: int) -> BaseException:
    """One error of all of them. own: this rank's."""
    if own is not None and not isinstance(own, Exception):
        return own
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures:
        ranks.setdefault(failure["text"], []).append(rank)
    text = "; ".join(
        text if len(where) == count else f"{text} (ranks {_short(where)})" for text, where in ranks.items()
    )
    said = [failure for _, failure in failures]
    if any(failure["interrupt"] for failure in said):
        return DistributedError(text)
    kind = CheckpointError
    if any(failure["lost"] for failure in said):
        kind = FolderLostError
    if any(failure["mismatch"] for failure in said):
        kind = CheckpointMismatchError
    found = kind(text)
    found.__cause__ = None if all(failure["expected"] for failure in said) else own
    return found


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _plan_to_json(plan: SavePlan) -> Json:
    declared: Declared = plan.planner_data
    return {
        "items": [_item_to_json(item) for item in plan.items],
        "tensors": {name: [list(shape), DTYPE_NAMES[dtype]] for name, (shape, dtype) in declared.tensors.items()},
        "scalars": dict(declared.scalars),
    }


def _plan_from_json(told: Json) -> SavePlan:
    tensors = {name: (tuple(shape), DTYPES[dtype]) for name, (shape, dtype) in told["tensors"].items()}
    return SavePlan([_item_from_json(item) for item in told["items"]], planner_data=Declared(tensors, told["scalars"]))


def _share_to_json(plan: SavePlan) -> Json:
    place: WriterInfo = plan.storage_data
    return {"items": [_item_to_json(item) for item in plan.items], "folder": str(place.folder), "rank": place.rank}


def _share_from_json(told: Json) -> SavePlan:
    place = WriterInfo(Path(told["folder"]), told["rank"])
    return SavePlan([_item_from_json(item) for item in told["items"]], storage_data=place)


def _item_to_json(item: WriteItem) -> Json:
    data = item.tensor_data
    assert data is not None, "Shards write tensors only"
    chunk = data.chunk
    return [item.index.fqn, list(chunk.offsets), list(chunk.sizes), DTYPE_NAMES[data.properties.dtype], list(data.size)]


def _item_from_json(told: Json) -> WriteItem:
    name, offsets, sizes, dtype, shape = told
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def _result_to_json(result: WriteResult) -> Json:
    stored: WrittenPiece = result.storage_data
    return [
        *(result.index.fqn, result.size_in_bytes, stored.file.to_json()),
        *(list(stored.box.offsets), list(stored.box.sizes)),
    ]


def _result_from_json(told: Json) -> WriteResult:
    name, size, (file, file_size, sha256), offsets, sizes = told
    stored = WrittenPiece(FileEntry(file, file_size, sha256), Box(tuple(offsets), tuple(sizes)))
    return WriteResult(MetadataIndex(name, torch.Size(offsets)), size, stored)
