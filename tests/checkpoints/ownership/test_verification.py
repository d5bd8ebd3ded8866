"""After a fault a run goes on from before it, or not at all; what vouches for a checkpoint is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megapar import trainer
from megapar.arguments import Config
from megapar.checkpoints.format.faults import NEVER, RECORD, read_fault
from megapar.checkpoints.ownership.scalars import Start
from megapar.errors import CorruptionError, TrainingError, UnverifiedError
from megapar.files.location import at
from megapar.health.corruption.guards import FaultRecord, Guards
from megapar.trainer import Outcome
from megapar.training.step.job import Job
from tests.support import here
from tests.support.damage import reseal
from tests.support.here import losses
from tests.support.stores import put

RESTART = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "job-a"}
# A save that is under way when a run fails in this process would end behind the assertions.
STEPS = ("--train-iters", "12", "--lr-decay-iters", "12", "--save-interval", "2", "--no-async-save")


class Late:
    """A check that runs every five steps only, and fails in the steps that it is given."""

    before_saves = False
    enabled = True

    def __init__(self, name: str, interval: int, bad: set[int]) -> None:
        self.name = name
        self.interval = interval
        self._bad = bad

    def before_update(self) -> None:
        pass

    def after_update(self, iteration: int) -> None:
        pass

    def check(self, iteration: int) -> None:
        if iteration in self._bad:
            self._bad.remove(iteration)  # a fault that does not come again
            raise CorruptionError(f"iteration {iteration}: odd", ranks=[0], parameters=["head.weight"])


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Iterations after which the check of every run in this test is going to fail."""
    found: set[int] = set()

    def make(*, config: Config, job: Job, start: Start, others: Collection[str], **_: Any) -> Guards:
        record = FaultRecord([Path(str(config.checkpoint.save))], job.world, start.iteration, others)
        return Guards([Late("often", 1, set()), Late("recompute", 5, found)], start, record)

    monkeypatch.setattr(trainer, "make_guards", make)
    yield found
    assert not found


def run_here(root: Path, *flags: str, **environ: str) -> Outcome:
    return here.run_here(root, *STEPS, "--load", str(root), *flags, **environ)


def verified(folder: Path) -> dict[str, int]:
    return dict(at(folder / "scalars.json").json()["verified"])


def names(root: Path) -> list[str]:
    return sorted(name for name in at(root).list() if name.startswith("iter_"))


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses(run_here(tmp_path_factory.mktemp("whole")))


def test_checkpoints_say_up_to_where_each_check_passed(tmp_path: Path, any_store: str, bad: set[int]) -> None:
    run_here(tmp_path)
    assert verified(tmp_path / "iter_0000004") == {"often": 4, "recompute": 0}
    assert verified(tmp_path / "iter_0000012") == {"often": 12, "recompute": 10}


def test_a_resumed_run_knows_what_its_checkpoint_does() -> None:
    names = ["a", "b"]
    assert Start(7, {"a": 5, "b": 9}).verified(names) == {"a": 5, "b": 7}
    assert Start(7, {"a": 5, "b": "x"}).verified(names) == {"a": 5, "b": NEVER}
    assert Start(7).verified(names) == {"a": NEVER, "b": NEVER}  # an old checkpoint
    assert Start().verified(names) == {"a": 0, "b": 0}


def test_an_interval_longer_than_all_that_is_kept_leaves_a_way_back(
    tmp_path: Path, any_store: str, bad: set[int], told: list[str], want: dict[int, float]
) -> None:
    bad.add(10)
    keep = ("--save-interval", "1", "--keep", "2")
    with pytest.raises(CorruptionError, match=r"iteration 10: odd Rank 0 on node .*, device cpu\."):
        run_here(tmp_path, *keep)
    assert names(tmp_path) == ["iter_0000005", "iter_0000008", "iter_0000009"]
    fault = read_fault(tmp_path)
    assert (fault.check, fault.iteration, fault.verified) == ("recompute", 10, {"often": 10, "recompute": 5})
    assert fault.parameters == ("head.weight",)
    again = run_here(tmp_path, *keep)
    assert losses(again) == {step: want[step] for step in range(6, 13)}
    assert any("after iteration 10 the check 'recompute' found wrong numbers: rank 0" in line for line in told)
    assert any(line.endswith("iter_0000008.suspect, iter_0000009.suspect") for line in told)
    assert {"iter_0000008.suspect", "iter_0000009.suspect", "iter_0000012"} <= set(names(tmp_path))
    assert not at(tmp_path / RECORD).is_file()
    assert at(tmp_path / "corruption-0000010.json").is_file()


def test_nothing_verified_is_refused_until_a_checkpoint_is_named(tmp_path: Path, any_store: str, bad: set[int]) -> None:
    bad.add(5)
    with pytest.raises(CorruptionError):
        run_here(tmp_path)
    for environ in ({}, RESTART):
        with (
            patch("megapar.config.files._only_suspects", lambda path: ()),  # looks first
            pytest.raises(UnverifiedError, match=r"that is left\. Set aside: iter_0000002\.suspect, iter_"),
        ):
            run_here(tmp_path, **environ)
    assert UnverifiedError.exit_status == 2
    assert min(losses(run_here(tmp_path, "--ckpt-step", "4"))) == 5
    assert not at(tmp_path / RECORD).is_file()


def test_a_run_that_had_saved_nothing_starts_again(tmp_path: Path, bad: set[int], want: dict[int, float]) -> None:
    bad.add(5)
    with pytest.raises(CorruptionError):
        run_here(tmp_path, "--save-interval", "100")
    assert losses(run_here(tmp_path)) == want


def test_a_run_from_elsewhere_goes_back_there_if_that_was_verified(
    tmp_path: Path, bad: set[int], want: dict[int, float]
) -> None:
    source, root = tmp_path / "a", tmp_path / "b"
    run_here(source, "--exit-interval", "5")
    bad.add(10)
    with pytest.raises(CorruptionError):
        run_here(root, "--load", str(source))
    assert losses(run_here(root, "--load", str(source), **RESTART)) == {step: want[step] for step in range(6, 13)}
    assert "iter_0000008.suspect" in names(root)


@pytest.mark.parametrize("old", [True, False])
def test_a_start_that_nothing_vouches_for_is_not_gone_back_to(tmp_path: Path, bad: set[int], old: bool) -> None:
    run_here(tmp_path, "--exit-interval", "4")
    if old:  # from before there was ``verified``
        for folder in tmp_path.glob("iter_*"):
            reseal(folder, verified=None)
    bad.add(5)
    with pytest.raises(CorruptionError):
        run_here(tmp_path)
    fault = read_fault(tmp_path)
    assert fault.limit == (NEVER if old else 0)
    with pytest.raises(UnverifiedError):
        run_here(tmp_path)


def test_another_runs_folder_is_read_and_left_as_it_is(
    tmp_path: Path, any_store: str, bad: set[int], told: list[str]
) -> None:
    source = tmp_path / "a"
    bad.add(10)
    with pytest.raises(CorruptionError):
        run_here(source)
    before = at(source).list()
    assert min(losses(run_here(tmp_path / "b", "--load", str(source)))) == 5
    assert at(source).list() == before
    assert any("Only older checkpoints are taken" in line for line in told)


def test_a_record_that_cannot_be_read_is_refused_until_a_checkpoint_is_named(
    tmp_path: Path, any_store: str, bad: set[int]
) -> None:
    run_here(tmp_path, "--exit-interval", "4")
    put(at(tmp_path / RECORD), b"{")
    with pytest.raises(UnverifiedError, match=r"corruption\.json records that a run found wrong numbers, and cannot"):
        run_here(tmp_path)
    assert min(losses(run_here(tmp_path, "--ckpt-step", "4"))) == 5


def test_the_first_record_stays(tmp_path: Path, any_store: str) -> None:
    class World:
        grid = type("grid", (), {"world_size": 2})
        launched = (0, 1)
        device = type("device", (), {"type": "cuda", "name": "H"})

    world: Any = World()

    def record_of_one() -> FaultRecord:
        made = FaultRecord([tmp_path], world, 0)
        made.hosts = ["one", "two"]
        return made

    error = record_of_one().write("state", 3, {"state": 2}, CorruptionError("first", ranks=[1]))
    assert str(error) == "first Rank 1 on node two, device cuda:1 (H)."
    assert str(record_of_one().write("state", 3, {}, TrainingError("second"))) == "second"
    fault = read_fault(tmp_path)
    assert fault.message == "first"
    assert [*at(tmp_path).list()] == [RECORD]


def test_a_record_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    world: Any = object()  # asked only where a rank is to blame
    told = FaultRecord([tmp_path / "file"], world, 0).write("state", 3, {}, TrainingError("odd"))
    assert "corruption.json could not be written" in str(told)
