"""What torch's agent is given for a rank: its process, and the files that it writes to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megapar.tools.launcher.warm_start import Handler


def test_a_rank_whose_log_file_is_gone_writes_where_the_launcher_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = str(tmp_path / "gone" / "rank-3.log")
    made = Handler(
        None, log, log, entrypoint=sys.executable, args=("-c", "print('here')"), env={"RANK": "3"}, local_rank_id=0,
        numa_options=None,
    )  # fmt: skip
    assert made.proc.wait(60) == 0
    said = capfd.readouterr()
    assert said.out == "here\n"
    assert said.err.startswith("megapar launch: no log file for ranks 3: ")
    assert said.err.count("\n") == 1
