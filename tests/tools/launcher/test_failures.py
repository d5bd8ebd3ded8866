"""Which failure is the same as the one before it: a rank's own, at the same line and step, nothing saved between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megapar.errors import DataError, DistributedError, TrainingError
from megapar.health.stop import failure
from megapar.launch_environment import failure_file
from megapar.tools.launcher.failures import Failure, first_failure, is_refusal, repeated

HERE = Failure("DataError", "source.py:7", 5, False, "32-39", 1.0)


def noted(folder: Path, error: BaseException, following: tuple[int, str] = (5, "32-39")) -> Failure | None:
    environ = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    try:
        raise error
    except BaseException as caught:
        failure.note(caught, environ, following)
        failure.note(RuntimeError("on the way out"), environ)
    return first_failure([failure_file(environ) or ""])


def test_what_a_rank_notes_is_what_the_launcher_reads(tmp_path: Path) -> None:
    found = noted(tmp_path, DataError("line 7"))
    assert found is not None
    assert (found.type, found.step, found.saved, found.samples) == ("DataError", 5, False, "32-39")
    assert found.where.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    "error",
    [
        DistributedError("ranks [1] are silent"),
        ConnectionResetError(),
        OSError(5, "Input/output error"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        KeyboardInterrupt(),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"),
    ],
)
def test_what_another_rank_or_the_machine_has_caused_is_nobody_s_own(tmp_path: Path, error: BaseException) -> None:
    assert noted(tmp_path, error) is None


@pytest.mark.parametrize(
    ("error", "samples"),
    [(TrainingError("replicas"), ""), (TrainingError("nan", "8-15"), "8-15"), (ValueError("a bug"), "")],
)
def test_samples_are_stepped_over_only_where_they_may_be_the_cause(
    tmp_path: Path, error: BaseException, samples: str
) -> None:
    found = noted(tmp_path, error)
    assert found is not None
    assert found.samples == samples


def test_only_the_same_is_the_same() -> None:
    told = repeated(HERE, replace(HERE, at=9.0))
    assert told.startswith("DataError at step 5 again, at source.py:7, with no checkpoint in between; the job is not")
    assert told.endswith("To skip the samples of that step, add --skip-samples 32-39 to the same command.")
    assert "before the first step" in repeated(replace(HERE, step=0), replace(HERE, step=0, samples=""))
    for other in ({"type": "OSError"}, {"where": "source.py:8"}, {"step": 6}, {"saved": True}):
        assert repeated(HERE, replace(HERE, **other)) == ""
    assert repeated(None, HERE) == repeated(HERE, None) == ""


@pytest.mark.parametrize(
    ("statuses", "refused"),
    [
        ([2, 2], True),
        ([2, -15], True),
        ([-15, 2], True),
        ([2, 1], True),
        ([1, 2], False),
        ([-9, 2], False),
        ([1], False),
    ],
)
def test_ranks_are_refused_where_none_failed_before(statuses: list[int], refused: bool) -> None:
    failures = {rank: SimpleNamespace(exitcode=status, timestamp=rank) for rank, status in enumerate(statuses)}
    assert is_refusal(failures) is refused


def test_files_that_say_nothing_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{")
    (tmp_path / "b").write_text('{"own": true, "type": "X"}')
    assert first_failure([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c"), ""]) is None
