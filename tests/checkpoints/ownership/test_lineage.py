"""Lines of checkpoints in one folder: a run goes on from its own, removes its own, and blames its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megapar.arguments import parse
from megapar.checkpoints.format.faults import RECORD
from megapar.checkpoints.ownership.scalars import NAMES, Lineage, names_on_lineage
from megapar.checkpoints.save_load import folder as folders
from megapar.checkpoints.save_load.checkpoints import Checkpoints
from megapar.checkpoints.save_load.local_saves import LocalSaves
from megapar.checkpoints.save_load.resume import FaultRecovery
from megapar.config.start import check_save
from megapar.errors import CheckpointError, ConfigError, UnverifiedError
from megapar.planning.variation import nearest
from megapar.tools.pretrain import checked_outline
from tests.support.damage import flip_bit, reseal
from tests.support.here import BASE, losses, run_here
from tests.support.training import COMMON, SMALL, last_wins

JOB_A, JOB_B = ({"TORCHELASTIC_RUN_ID": f"job-{name}"} for name in "ab")
RESTART = {**JOB_A, "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Job b has saved 2, 4 and 6; job a went back to 2 and has saved 3 and 5."""
    found = tmp_path / "c"
    run_here(found, **JOB_B)
    back = ("--load", str(found), "--ckpt-step", "2")
    run_here(found, *back, "--save-interval", "3", "--exit-interval", "5", **JOB_A)
    return found


def names(root: Path) -> list[str]:
    return sorted(path.name.removeprefix("iter_000000") for path in root.glob("iter_*"))


def record(root: Path, iteration: int, began: int, limit: int, others: list[str]) -> None:
    fault = {"check": "state", "iteration": iteration, "began": began, "verified": {"state": limit}}
    text = {"blamed": [], "parameters": [], "message": "it differs"}
    (root / RECORD).write_text(json.dumps({**fault, **text, "others": others}))


def test_a_checkpoint_names_those_before_it_on_its_line() -> None:
    there = ["iter_0000002", "iter_0000004", "iter_0000006"]
    assert names_on_lineage(there[1], {NAMES: there[:1], "iteration": 4}, there) == set(there[:2])
    assert names_on_lineage(there[1], {"iteration": 4}, there) == set(there[:2])  # of an earlier version
    line = Lineage()
    line.begin(there, names_on_lineage("", {NAMES: [there[0], "iter_0000001"], "iteration": 3}, there))
    assert line.agreed == there[:1]
    assert line.others == set(there[1:])


@pytest.mark.parametrize(("step", "environ"), [((), JOB_B), (("--ckpt-step", "2"), RESTART)])
def test_keep_removes_nothing_of_another_line(root: Path, step: tuple[str, ...], environ: dict[str, str]) -> None:
    run_here(root, "--load", str(root), *step, "--keep", "1", **environ)
    left = names(root)
    assert {"4", "6"} <= set(left)
    assert not {"2", "3"} & set(left)


def test_a_damaged_checkpoint_gives_way_to_one_of_its_own_line(root: Path, told: list[str]) -> None:
    flip_bit(next((root / "iter_0000005").glob("shard-*")))
    assert min(losses(run_here(root, "--load", str(root), **RESTART))) == 4
    assert "taking iter_0000003 instead" in told


def test_one_of_another_line_is_better_than_none_and_told(root: Path, told: list[str]) -> None:
    for step in (2, 3, 5):
        flip_bit(next((root / f"iter_000000{step}").glob("shard-*")))
    assert min(losses(run_here(root, "--load", str(root), **RESTART))) == 5
    assert "taking iter_0000004 instead, which is from a lineage that the run had gone back from" in told


@pytest.mark.parametrize("flags", [("--ckpt-step", "2"), ("--finetune",)])
def test_a_restart_before_the_first_save_asks_for_what_its_launch_did(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """What this job has saved by an earlier launch is what it was to turn back from."""
    run_here(tmp_path, **JOB_A, MEGAPAR_LAUNCH="first")
    line = ("--load", str(tmp_path), *flags)
    begun = run_here(tmp_path, *line, "--exit-interval", "3", **RESTART, MEGAPAR_LAUNCH="second")
    assert min(losses(begun)) == (1 if "--finetune" in flags else 3)
    again = run_here(tmp_path, *line, **RESTART, MEGAPAR_LAUNCH="second")
    assert min(losses(again)) == 4


def test_a_run_whose_checkpoints_cannot_be_read_does_not_start_over(tmp_path: Path) -> None:
    run_here(tmp_path, "--keep", "1", **JOB_A)
    for folder in tmp_path.glob("iter_*"):
        flip_bit(folder / "layout.json")
    with pytest.raises(CheckpointError, match="none of them can be read: without --load the run would begin at itera"):
        run_here(tmp_path, "--keep", "1", **RESTART)
    with pytest.raises(CheckpointError, match="without --load"):
        run_here(tmp_path, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="1")


def test_what_a_fault_in_another_line_says_is_of_no_concern_to_a_tuned_one(tmp_path: Path, told: list[str]) -> None:
    """A run that counts from 0 is tuned beside what it began from, whose iterations are other ones."""
    run_here(tmp_path)
    pretrained = [path.name for path in folders.checkpoints(tmp_path).values()]
    record(tmp_path, iteration=1, began=0, limit=0, others=pretrained)
    tuned = ("--load", str(tmp_path), "--finetune", "--save-interval", "4")
    run_here(tmp_path, *tuned, "--exit-interval", "5")
    assert f"weights: {tmp_path / 'iter_0000006'}; the run starts at iteration 0" in told
    record(tmp_path, iteration=5, began=0, limit=3, others=pretrained)
    with pytest.raises(UnverifiedError, match=r"Set aside: iter_0000004\.e"):
        run_here(tmp_path, *tuned)
    assert {"2", "4", "6", "5.suspect"} <= set(names(tmp_path))


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_is_the_same_however_it_is_spelled(tmp_path: Path, slash: str) -> None:
    run_here(tmp_path, "--exit-interval", "4", "--save-interval", "4")
    record(tmp_path, iteration=5, began=2, limit=3, others=[])
    with pytest.raises(UnverifiedError, match="No checkpoint from before that is left"):
        run_here(tmp_path, "--load", f"{tmp_path}{slash}")


def test_of_a_checkpoint_in_memory_and_one_on_disk_the_newer_is_taken(tmp_path: Path, told: list[str]) -> None:
    root, local = tmp_path / "c", ("--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(tmp_path / "m"))
    line = ("--load", str(root))
    with patch.object(LocalSaves, "remove", LocalSaves.join_save):  # a killed run leaves them
        run_here(root, *line, *local, "--exit-interval", "3", **JOB_A)
    run_here(root, *line, "--exit-interval", "5", **JOB_A)  # goes on elsewhere, and comes back
    assert sorted(losses(run_here(root, *line, *local, **JOB_A))) == [6]
    with patch.object(LocalSaves, "remove", LocalSaves.join_save):
        run_here(root, *line, *local, "--ckpt-step", "2", "--exit-interval", "5", **JOB_A)
    told.clear()
    assert min(losses(run_here(root, *line, *local, "--ckpt-step", "2", **JOB_A))) == 3
    assert not [text for text in told if "taking the local checkpoint" in text]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({NAMES: [{}]}, "lineage is [{}], where a list of names of checkpoints is needed"),
        ({"identity": {"version": 1, "phases": []}}, "identity is {"),
    ],
)
def test_scalars_that_no_run_wrote_give_way_to_an_older_checkpoint(
    tmp_path: Path, told: list[str], other: dict[str, object], said: str
) -> None:
    run_here(tmp_path, "--exit-interval", "4", **JOB_A)
    reseal(tmp_path / "iter_0000004", **other)
    assert min(losses(run_here(tmp_path, "--load", str(tmp_path), **RESTART))) == 3
    assert any(said in line for line in told)
    assert "taking iter_0000002 instead" in told


def test_memory_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "file").touch()
    local = ("--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(tmp_path / "file" / "m"))
    assert max(losses(run_here(tmp_path / "c", *local, **JOB_A))) == 6
    (line,) = [line for line in told if "no local checkpoints" in line]
    assert line.startswith("WARNING: no local checkpoints: ")
    assert "--local-checkpoint-dir" in line


@pytest.mark.parametrize("back", [("--ckpt-step", "2"), ("--finetune",)])
def test_a_restart_from_memory_stays_on_the_line_that_it_went_back_to(
    back: tuple[str, ...], tmp_path: Path, told: list[str]
) -> None:
    root, local = tmp_path / "c", ("--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(tmp_path / "m"))
    line = ("--load", str(root), *back, *local, "--save-interval", "100")
    run_here(root, **JOB_B)
    killed = (
        patch.multiple(LocalSaves, remove=LocalSaves.join_save),
        patch.object(Checkpoints, "save", lambda *_, **__: None),
    )
    with killed[0], killed[1]:
        run_here(root, *line, "--exit-interval", "4", **JOB_A)
    told.clear()
    assert min(losses(run_here(root, *line, **RESTART))) == 4
    assert "taking the local checkpoint of iteration 3" in told


def test_a_checkpoint_before_one_in_memory_is_of_its_line(tmp_path: Path) -> None:
    root, local = tmp_path / "c", ("--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(tmp_path / "m"))
    save = ("--save-interval", "2", "--no-async-save", *local)
    saved = Checkpoints.save

    def until_2(self: Checkpoints, iteration: int, scalars: dict[str, Any], *, final: bool) -> None:
        if iteration <= 2:
            saved(self, iteration, scalars, final=final)

    with patch.object(LocalSaves, "remove", LocalSaves.join_save), patch.object(Checkpoints, "save", until_2):
        run_here(root, *save, "--exit-interval", "4", **JOB_A)
    assert min(losses(run_here(root, *save, "--keep", "1", **RESTART))) == 4
    assert names(root) == ["6"]


def test_a_limit_holds_for_a_folder_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(tmp_path / "c", "--exit-interval", "4")
    monkeypatch.setattr(FaultRecovery, "_local_limit", lambda self: (3, True))
    monkeypatch.setattr(FaultRecovery, "_set_aside", lambda self, fault: [])
    assert min(losses(run_here(Path("c"), "--load", str(tmp_path / "c")))) == 3


def test_a_job_whose_newest_checkpoint_cannot_be_read_is_still_its_own(tmp_path: Path) -> None:
    run_here(tmp_path, "--exit-interval", "4", **JOB_A)
    values = {"load": None, "save": str(tmp_path)}
    assert check_save(RESTART, values) == []
    (tmp_path / "iter_0000004" / "scalars.json").write_bytes(b"")
    assert check_save(RESTART, values) == []
    assert min(losses(run_here(tmp_path, **RESTART))) == 3
    for path in tmp_path.glob("iter_*/scalars.json"):
        path.write_bytes(b"")
    (complaint,) = check_save(RESTART, values)
    assert "another run, up to iteration 6" in complaint.message


def test_a_restart_goes_on_after_the_checkpoint_that_it_began_with_has_been_removed(tmp_path: Path) -> None:
    run_here(tmp_path, "--exit-interval", "2", **JOB_B)
    line = ("--load", str(tmp_path), "--ckpt-step", "2", "--keep", "1", "--save-interval", "1")
    run_here(tmp_path, *line, "--exit-interval", "4", **JOB_A)
    assert names(tmp_path) == ["4"]
    with patch.dict(os.environ, RESTART):  # on fewer ranks, too
        small = last_wins((*SMALL["moe"], *COMMON), (*BASE, "--save", str(tmp_path), *line))
        assert nearest("moe", small, 2, 1) is not None
    assert min(losses(run_here(tmp_path, *line, **RESTART))) == 5


def test_a_restart_goes_on_whatever_is_now_where_it_began(tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    run_here(base, "--exit-interval", "2", **JOB_B)
    run_here(own, "--load", str(base), "--exit-interval", "4", **JOB_A)
    shutil.rmtree(base)
    run_here(base, "--exit-interval", "2", "--hidden-size", "64", **JOB_B)
    line = last_wins((*SMALL["moe"], *COMMON), (*BASE, "--save", str(own), "--load", str(base)))
    with pytest.raises(ConfigError, match="another model"):
        checked_outline(parse("moe", line, {}))
    with patch.dict(os.environ, RESTART):
        assert checked_outline(parse("moe", line))
    assert min(losses(run_here(own, "--load", str(base), **RESTART))) == 5
