"""Checkpoints of a run: which one it goes on from, how many are kept, and what a failing disk does to training."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megapar.arguments import parse
from megapar.checkpoints.format import shards
from megapar.checkpoints.format.shards import HashedFile
from megapar.checkpoints.ownership.owner import Owner
from megapar.checkpoints.save_load import folder as folders
from megapar.checkpoints.save_load.checkpoints import Checkpoints
from megapar.core.device.base import Device
from megapar.errors import CheckpointError, CheckpointMismatchError, ConfigError, MegaparError
from megapar.files.location import Place, at
from megapar.health.stop.control import Control, StopSignal
from megapar.trainer import train
from tests.support.damage import cut, flip_bit
from tests.support.here import BASE, losses, run_here
from tests.support.ranks import run_ranks
from tests.support.stores import copied, names, put
from tests.support.training import COMMON, SMALL, last_wins

RESTART = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "job-a"}
Saved = tuple[Path, dict[int, float]]  # the folder and the losses of a run
METRICS = ("metrics.experts.jsonl", "metrics.jsonl", "run.json")  # of every run of a model with experts that saves


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run with checkpoints 2, 4 and 6, and its losses."""
    root = tmp_path_factory.mktemp("saved")
    return root, losses(run_here(root))


@pytest.fixture
def root(saved: Saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "c"))


@pytest.fixture
def kept(any_store: str, saved: Saved, tmp_path: Path) -> Path:
    """Return the same checkpoints on a disk, or in memory."""
    (tmp_path / "c").mkdir()
    copied(saved[0], at(tmp_path / "c"))
    return tmp_path / "c"


def shard_of(root: Path, iteration: int) -> Path:
    folder = root / f"iter_{iteration:07d}"
    return folder / next(name for name in names(at(folder)) if name.startswith("shard-"))


@pytest.mark.parametrize("damage", ["bit", "truncated", "layout", "no layout", "latest", "no folder"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    damage: str, kept: Path, saved: Saved, told: list[str]
) -> None:
    newest = kept / "iter_0000006"
    at(newest).remove() if damage == "no folder" else None
    if damage == "bit":
        flip_bit(shard_of(kept, 6))
    elif damage == "truncated":
        cut(shard_of(kept, 6), 1000)
    elif damage == "layout":
        flip_bit(newest / "layout.json")
    elif damage == "no layout":
        at(newest / "layout.json").remove()
    elif damage == "latest":
        at(newest).remove()
        put(at(kept / "latest"), b"\0garbage")
    outcome = run_here(kept, "--load", str(kept))
    assert losses(outcome) == {step: saved[1][step] for step in (5, 6)}
    assert any(line.startswith("WARNING") for line in told)
    assert "taking iter_0000004 instead" in told
    made = newest if damage in ("latest", "no folder") else kept / "iter_0000006.e2"
    assert folders.latest(kept) == at(made)  # anew, by the second owner; the damaged one stays as it is
    assert newest.name in at(kept).list()


def test_a_damaged_checkpoint_stops_the_run_where_that_is_wanted(kept: Path) -> None:
    flip_bit(shard_of(kept, 6))
    with pytest.raises(CheckpointError, match="iter_0000006 is damaged"):
        run_here(kept, "--load", str(kept), "--on-bad-checkpoint", "stop")
    put(at(kept / "latest"), b"")
    with pytest.raises(CheckpointError, match="latest names ''"):
        run_here(kept, "--load", str(kept), "--on-bad-checkpoint", "stop")


def test_where_none_is_sound_all_are_named(kept: Path) -> None:
    for iteration in (2, 4, 6):
        flip_bit(shard_of(kept, iteration))
    with pytest.raises(CheckpointError, match=r"no sound checkpoint(.*damaged){3}"):
        run_here(kept, "--load", str(kept))


def test_a_run_that_has_no_step_left_tells_what_its_model_is_worth(root: Path, told: list[str]) -> None:
    evaluated = ("--eval-interval", "1", "--eval-iters", "2", "--load", str(root), "--override-opt-param-scheduler")
    evaluated += ("--recompute-check-interval", "7")  # what is due there has no step to run again
    trained = run_here(root, *evaluated, "--train-iters", "7")
    told.clear()
    done = run_here(root, *evaluated, "--train-iters", "7")
    assert done.iteration == 7
    assert done.records == ()
    assert done.evaluation == trained.evaluation
    assert done.evaluation is not None
    assert "no step is left: iteration 7 is done, --train-iters is 7" in told
    (line,) = (line for line in told if line.startswith(f"held-out loss {done.evaluation['loss']:.4f} (lm "))
    assert re.search(r"\), \d+ of 1,048,576 samples$", line)


def test_only_the_newest_are_kept(tmp_path: Path, any_store: str) -> None:
    for name in ("iter_0000099", "iter_0000002.tmp-0123456789ab"):  # the second one is of a killed save
        put(at(tmp_path / name / "scalars.json"), b"")
    run_here(tmp_path, "--keep", "2")
    assert list(folders.checkpoints(tmp_path)) == [4, 6]
    kept = ["iter_0000004", "iter_0000006", "iter_0000099", "latest", "owner"]
    assert {*names(at(tmp_path))} - {*METRICS} == {*kept}
    assert any(tmp_path.glob("iter_*")) == (any_store == "disk")


def test_a_checkpoint_that_was_not_published_is_removed_in_its_turn(
    tmp_path: Path, any_store: str, told: list[str]
) -> None:
    """It is complete, and takes the room of one that counts."""
    publish = folders.publish

    def sometimes(root: Place, iteration: int, owner: Owner | None = None) -> None:
        if iteration in (2, 4):
            raise CheckpointError("stale file handle")
        publish(root, iteration, owner)

    with patch.object(folders, "publish", sometimes):
        run_here(tmp_path, "--keep", "1", "--save-interval", "1")
    assert len([line for line in told if "stale file handle" in line]) == 2
    kept = list(folders.checkpoints(tmp_path))
    assert kept[-1] == 6
    assert 2 not in kept
    assert len(kept) <= 2  # 6, and the newest that the checks have verified


def full_disk(file: HashedFile, tensor: torch.Tensor) -> int:
    """A tensor writer that finds the disk full when checkpoint 4 is written."""
    if "iter_0000004" in str(file._path):
        raise OSError(28, "No space left on device")
    file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return tensor.nbytes


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path: Path, saved: Saved, told: list[str]) -> None:
    with patch.object(shards, "_write_tensor", full_disk):
        outcome = run_here(tmp_path)
    assert losses(outcome) == saved[1]
    failed = [line for line in told if line.startswith("WARNING: iter_0000004 was not saved")]
    assert len(failed) == 1
    assert "No space left on device" in failed[0]
    kept = ["iter_0000002", "iter_0000006", "latest", "owner"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *METRICS])


def test_a_rank_without_memory_for_the_copy_fails_the_save_and_not_the_run(tmp_path: Path, told: list[str]) -> None:
    with patch.object(Device, "pinned_zeros", side_effect=MemoryError("no memory")):
        outcome = run_here(tmp_path / "c")
    assert outcome.iteration == 6
    assert [path.name for path in folders.checkpoints(tmp_path / "c").values()] == ["iter_0000006"]
    assert any("iter_0000002 was not saved: no copy of the state in host memory: MemoryError" in line for line in told)
    assert any("iter_0000004 was not saved, the 2nd checkpoint in a row" in line for line in told)


def test_the_other_ranks_hear_of_a_copy_that_failed(tmp_path: Path) -> None:
    run_ranks(2, lose_a_copy, tmp_path / "c", group=False)
    assert list(folders.checkpoints(tmp_path / "c")) == [6]


def lose_a_copy(rank: int, world_size: int, rendezvous: str, root: Path) -> None:
    """Rank 1 has no memory for copies; both ranks train on, and save at the end, for which none is made."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    line = last_wins((*SMALL["moe"], *COMMON), (*BASE, "--save", str(root), "--sharding-degree", "2"))
    full = patch.object(Device, "pinned_zeros", side_effect=MemoryError("no memory"))
    with patch.dict(os.environ, place), full if rank else nullcontext():
        assert train(parse("moe", line, dict(os.environ)), f"file://{rendezvous}").iteration == 6


def test_a_checkpoint_is_saved_although_an_older_one_cannot_be_removed(tmp_path: Path, told: list[str]) -> None:
    with patch.object(folders, "keep_newest", side_effect=OSError(1, "Operation not permitted")):
        outcome = run_here(tmp_path / "c", "--keep", "1")
    assert outcome.checkpoint == tmp_path / "c" / "iter_0000006"
    assert "WARNING: an older checkpoint could not be removed: [Errno 1] Operation not permitted" in told
    assert not [line for line in told if "was not saved" in line]


def test_a_failed_save_stops_the_run_where_that_is_wanted(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with (
        patch.object(shutil, "disk_usage", lambda path: usage),
        pytest.raises(CheckpointError, match=r"no room under .*: a checkpoint takes [0-9,]+ bytes and 1,000 are free"),
    ):
        run_here(tmp_path, "--on-save-error", "stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["owner", *METRICS])


def test_the_final_checkpoint_must_not_fail(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    with pytest.raises((MegaparError, OSError)):
        run_here(tmp_path / "file", "--save-interval", "0")


def test_a_restart_goes_on_from_what_its_own_job_saved(root: Path, tmp_path: Path, saved: Saved) -> None:
    with pytest.raises(CheckpointError, match="not known to be of this job: without --load the run would begin at"):
        run_here(root, **RESTART)
    own = tmp_path / "own"
    run_here(own, "--exit-interval", "3", TORCHELASTIC_RUN_ID="job-a")
    assert losses(run_here(own, **RESTART)) == {step: saved[1][step] for step in (4, 5, 6)}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_job_that_is_started_again_by_its_name_goes_on_from_what_it_saved(
    root: Path, tmp_path: Path, saved: Saved, told: list[str], elsewhere: bool
) -> None:
    own, load = tmp_path / "own", ("--load", str(root), "--ckpt-step", "2") if elsewhere else ()
    run_here(own, *load, "--exit-interval", "3", TORCHELASTIC_RUN_ID="job-a")
    assert losses(run_here(own, *load, TORCHELASTIC_RUN_ID="job-a")) == {step: saved[1][step] for step in (4, 5, 6)}
    instead = f", not from --load {root}" if elsewhere else ""
    assert f"--save {own} contains checkpoints of this job, job-a: the run resumes from them{instead}" in told


def test_a_restart_before_the_first_save_starts_as_the_job_did(root: Path, tmp_path: Path, saved: Saved) -> None:
    again = ("--load", str(root), "--ckpt-step", "2", "--save-interval", "0")
    assert losses(run_here(tmp_path / "b", *again, **RESTART)) == {n: saved[1][n] for n in (3, 4, 5, 6)}


def test_a_restart_goes_on_with_its_moments_where_it_loads_from_where_it_saves(root: Path, saved: Saved) -> None:
    line = ("--load", str(root), "--finetune", "--exit-interval", "3")
    first = losses(run_here(root, *line, TORCHELASTIC_RUN_ID="job-a"))
    assert sorted(first) == [1, 2, 3]
    (root / "latest").write_text("iter_0000003\n")
    assert sorted(losses(run_here(root, *line, **RESTART))) == [4, 5, 6]


def test_a_run_with_nothing_left_to_do_still_saves(root: Path, tmp_path: Path) -> None:
    outcome = run_here(tmp_path / "b", "--load", str(root))
    assert outcome.records == ()
    assert folders.latest(tmp_path / "b") == at(tmp_path) / "b" / "iter_0000006"
    before = {path: path.stat().st_mtime_ns for path in root.rglob("iter_*/*")}
    run_here(root, "--load", str(root))  # there it is
    assert {path: path.stat().st_mtime_ns for path in root.rglob("iter_*/*")} == before


def test_a_block_that_the_checkpoint_lacks_starts_anew(root: Path, tmp_path: Path, told: list[str]) -> None:
    line = ("--load", str(root), "--mtp-depth", "1", "--exit-interval", "1")
    assert run_here(tmp_path / "b", *line, "--finetune").iteration == 1
    assert any(
        line.endswith("has no multi-token prediction block; it starts from its initial weights") for line in told
    )
    with pytest.raises(CheckpointMismatchError, match="--mtp-depth is 0 there and 1 here"):
        run_here(tmp_path / "c", *line)
    back = ("--load", str(tmp_path / "b"), "--finetune", "--exit-interval", "1")
    assert run_here(tmp_path / "d", *back).iteration == 1  # and one that only it has is left


def test_a_save_that_failed_is_tried_again_at_the_end(tmp_path: Path, told: list[str]) -> None:
    write, failures = shards._write_tensor, iter([OSError(28, "No space left on device")])

    def once(*args: Any) -> int:
        for failure in failures:
            raise failure
        return write(*args)

    save = Checkpoints.save

    def in_the_background_first(self: Checkpoints, iteration: int, scalars: Mapping[str, Any], *, final: bool) -> None:
        for last in (False, True):
            save(self, iteration, scalars, final=last)

    with patch.object(shards, "_write_tensor", once), patch.object(Checkpoints, "save", in_the_background_first):
        outcome = run_here(tmp_path, "--exit-interval", "2")
    assert any("iter_0000002 was not saved" in line for line in told)
    assert outcome.checkpoint == tmp_path / "iter_0000002"
    assert folders.latest(tmp_path) == at(outcome.checkpoint)


def test_planned_exits_save_and_go_on(tmp_path: Path, any_store: str, saved: Saved) -> None:
    first = run_here(tmp_path, "--exit-interval", "3")
    assert first.iteration == 3
    assert folders.latest(tmp_path) == at(tmp_path) / "iter_0000003"
    assert run_here(tmp_path, "--load", str(tmp_path), "--exit-duration-minutes", "1e-9").iteration == 4
    assert losses(run_here(tmp_path, "--load", str(tmp_path))) == {step: saved[1][step] for step in (5, 6)}


def test_a_stop_in_the_last_step_is_the_end_of_training(tmp_path: Path) -> None:
    outcome = run_here(tmp_path / "c", "--exit-interval", "6", "--save-hf", str(tmp_path / "hf"))
    assert outcome.iteration == 6
    assert outcome.exported == tmp_path / "hf"
    assert (tmp_path / "hf" / "config.json").is_file()


def test_weights_alone_are_saved_beside_the_checkpoint_that_they_are_from(root: Path) -> None:
    before = shard_of(root, 6).read_bytes()
    assert run_here(root, "--load", str(root), "--finetune").iteration == 6
    assert shard_of(root, 6).read_bytes() == before
    assert folders.latest(root) == at(root) / "iter_0000006.e2"


def test_only_what_a_run_made_or_comes_from_makes_room(kept: Path) -> None:
    """Checkpoint 6 is of another way than the one that went on from 4."""
    line = ("--load", str(kept), "--ckpt-step", "4", "--keep", "1", "--save-interval", "1", "--state-digest-steps", "1")
    run_here(kept, *line, "--train-iters", "8", "--override-opt-param-scheduler")
    left = [name for name in names(at(kept)) if name.startswith("iter_")]
    assert left == ["iter_0000006", "iter_0000008"]


def test_what_is_not_logged_yet_is_logged_before_a_save(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    seen: list[int] = []
    save = Checkpoints.save

    def look(self: Checkpoints, iteration: int, scalars: Mapping[str, Any], *, final: bool) -> None:
        seen.append(len(metrics.read_text().splitlines()))
        save(self, iteration, scalars, final=final)

    with patch.object(Checkpoints, "save", look):
        run_here(tmp_path / "c", "--log-interval", "100", "--metrics-jsonl", str(metrics))
    assert seen == [2, 4, 6]


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    run_here(tmp_path, "--save-interval", "0", "--save-interval-minutes", "1e-9")
    assert list(folders.checkpoints(tmp_path)) == [1, 2, 3, 4, 5, 6]


def stop_one_rank(rank: int, world_size: int, rendezvous: str, root: str) -> int:
    line = last_wins((*SMALL["moe"], *COMMON), ("--mp-degree", "2", "--save", root, "--train-iters", "1000"))
    stop = StopSignal()
    if rank == 1:
        stop._on_main_thread(15)
    with patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        return train(parse("moe", line, dict(os.environ)), f"file://{rendezvous}", stop).iteration


def test_a_signal_to_one_rank_stops_all_in_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(2, stop_one_rank, str(tmp_path), group=False) == [1, 1]


def test_only_the_leaders_clock_counts() -> None:
    options = replace(parse("moe", [], {}).checkpoint, save_interval_minutes=1e-9, exit_duration_minutes=1e-9)
    assert Control(options, None, leader=False).votes() == [0, 0, 0, 0]
    assert Control(options, None, leader=True).votes() == [0, 1, 1, 0]


def test_a_rotary_model_may_know_more_positions_than_its_checkpoint(root: Path) -> None:
    longer = ("--load", str(root), "--max-position-embeddings", "4096", "--train-iters", "7", "--save-interval", "0")
    assert run_here(root, *longer, "--override-opt-param-scheduler").iteration == 7
    learned = ("--position-embedding-type", "learned", "--save", str(root / "b"))
    run_here(root, *learned, "--exit-interval", "1")
    with pytest.raises(CheckpointError, match=r"--max-position-embeddings is .* there and 4096 here"):
        run_here(root, *learned, "--load", str(root / "b"), "--max-position-embeddings", "4096")


def test_the_last_line_of_a_run_that_was_stopped_says_how_to_go_on(tmp_path: Path, told: list[str]) -> None:
    root = tmp_path / "my runs"
    stopped = run_here(root, "--exit-interval", "3")
    assert stopped.iteration == 3
    assert told[-1] == f"to continue, run the same command with --load '{root}'"
    told.clear()
    assert run_here(root, "--load", str(root), "--exit-interval", "2").iteration == 4
    assert told[-1] == "to continue, run the same command again"
    told.clear()
    assert run_here(root, "--load", str(root)).iteration == 6
    assert told[-1].startswith("checkpoint: ")  # it came to its end


def test_a_step_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint of --ckpt-step 4"):
        run_here(tmp_path, "--load", str(tmp_path), "--ckpt-step", "4")
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 4"):
        run_here(tmp_path, "--load", str(tmp_path), "--ckpt-step", "4", **RESTART)
    assert not list(tmp_path.glob("iter_*"))


def test_what_latest_names_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("iter_0000002")
    with pytest.raises(ConfigError, match="latest names 'iter_0000002'"):
        run_here(tmp_path, "--load", str(tmp_path))
    with pytest.raises(CheckpointError, match="iter_0000002"):
        run_here(tmp_path, "--load", str(tmp_path), **RESTART)


def test_a_restart_with_suspects_alone_does_not_begin_again(tmp_path: Path) -> None:
    run_here(tmp_path, "--exit-interval", "2")
    (tmp_path / "iter_0000002").rename(tmp_path / "iter_0000002.suspect")
    (tmp_path / "latest").unlink()
    for environ, error in ((RESTART, CheckpointError), ({}, ConfigError)):
        with pytest.raises(error, match=r"[Ss]et aside"):
            run_here(tmp_path, "--load", str(tmp_path), **environ)


def test_how_to_go_on_leaves_out_what_would_go_back(tmp_path: Path, told: list[str]) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    run_here(base, "--exit-interval", "2")
    run_here(tuned, "--load", str(base), "--finetune", "--exit-interval", "3")
    assert told[-1] == f"to continue, run the same command with --load {tuned}, without --finetune"
    assert run_here(tuned, "--load", str(tuned), "--exit-interval", "4").iteration == 4  # not from 0
    told.clear()
    run_here(tuned, "--load", str(tuned), "--ckpt-step", "3", "--exit-interval", "4")
    assert told[-1] == "to continue, run the same command again, without --ckpt-step"
