"""Saves and loads over all ranks: the protocol of torch.distributed.checkpoint (DCP) with JSON instead of pickles.

    every rank      plan --------+               its part ------+
    first rank                   +-> assignment                 +-> finish

Each rank plans, the first rank collects all plans and returns an assignment to each, and each rank does its part. A
failure on any rank fails on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megapar.checkpoints.format.layout import CheckpointLayout, FileEntry, parse_layout, read_layout
from megapar.checkpoints.format.shards import Shard, Verify
from megapar.checkpoints.ownership.owner import Owner
from megapar.checkpoints.save_load import planner
from megapar.checkpoints.save_load.folder import move_into_place, remove_aside
from megapar.checkpoints.save_load.storage import begin_save, fill_targets, verify_files, write_layout, write_rank
from megapar.core.comm import json_messages as messages
from megapar.core.units import Json
from megapar.errors import CheckpointError, CheckpointMismatchError, DistributedError, FolderLostError
from megapar.files.location import Location, Place, at


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

    Raises CheckpointError on every rank if any rank fails (FolderLostError if the owner has a successor), and
    DistributedError if a rank has died. The temporary folder is then removed; if only ``then`` failed, the checkpoint
    stays.

    Args:
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
    merged: list[planner.GlobalPlan] = []  # on the first rank

    def plan() -> Json:
        if isinstance(state, CheckpointError):
            raise state
        return planner.plan_save(state, scalars).to_json()

    def assign(received: list[Json]) -> list[Json]:
        merged.append(planner.merge_plans([planner.SavePlan.from_json(value) for value in received]))
        name = begin_save(folder, merged[0].num_bytes, owner)
        return [[name, rank, list(boxes)] for rank, boxes in enumerate(merged[0].boxes)]

    def write(name: str, rank: int, tensors: list[str]) -> Json:
        assert not isinstance(state, CheckpointError), "a plan was made of it"
        file = write_rank(folder.with_name(name), rank, [state[tensor] for tensor in tensors])
        return None if file is None else file.to_json()

    def finish(received: list[Json]) -> list[Json]:
        files = [None if value is None else FileEntry(*value) for value in received]
        aside = folder.with_name(part[0])
        write_layout(aside, merged[0], files, layout)
        final = move_into_place(aside, folder, owner)
        if then is not None:
            then(final)
        return [None] * len(received)

    try:
        part = _step(f"saving {folder}", plan, assign, group)
        _step(f"saving {folder}", lambda: write(*part), finish, group)
    except BaseException:
        if group is None or dist.get_rank(group) == 0:
            remove_aside(folder, owner)
        raise


def load(
    folder: Place,
    targets: Mapping[str, Shard],
    *,
    expect_model: planner.ModelCheck | None,
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
        verify: The check of the files that this rank needs.
        group: The ranks that load; None for this process alone.
    """
    planned: list[planner.LoadPlan] = []
    scalars: dict[str, Json] = {}

    def plan() -> Json:
        planned.append(planner.plan_load(folder, targets, expect_model))
        scalars.update(verify_files(folder, planned[0], verify))
        return sorted(targets)

    def check(received: list[Json]) -> list[Json]:
        planner.refuse_extra(folder, planned[0].layout, received, ignore)
        return [None] * len(received)

    def read() -> Json:
        fill_targets(folder, planned[0], targets)
        return None

    _step(f"loading {folder}", plan, check, group)
    _step(f"loading {folder}", read, lambda received: [None] * len(received), group)
    return scalars


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


def _step(
    what: str, act: Callable[[], Json], answer: Callable[[list[Json]], list[Json]], group: dist.ProcessGroup | None
) -> Json:
    """Call ``act`` on every rank and ``answer`` on the first with all results. Return this rank's answer."""
    local_error: BaseException | None = None
    message: dict[str, Json]
    try:
        message = {"value": act()}
    except BaseException as error:
        local_error, message = error, {"failure": _failure_to_json(what, error)}
    try:
        everyone = [message] if group is None else messages.gather(message, group)
        answers: list[Json] | None = None
        if everyone is not None:
            failures = {rank: reply["failure"] for rank, reply in enumerate(everyone) if "failure" in reply}
            try:
                answers = [] if failures else [{"value": part} for part in answer([each["value"] for each in everyone])]
            except BaseException as error:
                local_error, failures = error, {0: _failure_to_json(what, error)}
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
    raise _merged_error(reply["failures"], local_error, 1 if group is None else dist.get_world_size(group))


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


def _merged_error(failures: Sequence[Sequence[Any]], local_error: BaseException | None, count: int) -> BaseException:
    """Return one error for the failures of all ranks: (rank, failure as JSON) of each failed rank."""
    if local_error is not None and not isinstance(local_error, Exception):
        return local_error
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures:
        ranks.setdefault(failure["text"], []).append(rank)
    text = "; ".join(
        text
        if len(failed) == count
        else f"{text} (ranks {', '.join(map(str, failed[:8]))}{', ...' * (len(failed) > 8)})"
        for text, failed in ranks.items()
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
    merged.__cause__ = None if all(failure["expected"] for failure in reasons) else local_error
    return merged
