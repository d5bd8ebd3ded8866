"""Per-rank log files of ``--log-dir DIR``: DIR/JOB/attempt-K/rank-N.log, with the job's name and global ranks.

Nodes may share the folder. A file from an earlier launch with the same name is kept as rank-N.log.1, .2 and so on, the
newest last. If a file cannot be opened, its rank runs without one: log files never end a run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from megapar.errors import DistributedError
from megapar.files.path_part import path_part
from megapar.health.stop.signal_listener import write_stderr
from megapar.launch_environment import starts_before
from megapar.tools.launcher.places import RankFiles


class RankLogs(LogsSpecs):
    """torch's specification of log files.

    Args:
        log_dir: Folder of the log files; "" if ranks share the launcher's output.
    """

    def __init__(self, log_dir: str = "") -> None:
        super().__init__(log_dir or None)
        try:
            self._kept: object = (files := RankFiles())  # a later launcher removes its folder if this one is killed
            self._errors = files.folder
        except DistributedError:  # TMPDIR and the other places are shared with other machines
            self._kept = tempfile.TemporaryDirectory(prefix="megapar-errors-", ignore_cleanup_errors=True)
            self._errors = Path(self._kept.name)
        self._starts = 0

    @property
    def root_log_dir(self) -> str:
        """The folder, as torch's interface requires it."""
        return str(self._root_log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the files of the next start.

        Args:
            envs: Local rank -> environment. Each gets the path of the file in which its rank records its failure.
        """
        errors = self._errors / str(self._starts)
        with contextlib.suppress(OSError):  # ranks that cannot write their error file still print the error
            errors.mkdir()
        self._starts += 1
        logs = dict.fromkeys(envs, "")
        files, without = {}, {}
        for rank, environ in envs.items():
            files[rank] = environ["TORCHELASTIC_ERROR_FILE"] = str(errors / f"{rank}.json")
            if self._root_log_dir:
                try:
                    logs[rank] = str(_created(log_file(self._root_log_dir, {**os.environ, **environ})))
                except OSError as error:
                    without[environ["RANK"]] = error
        if without:
            report_missing_logs(", ".join(without), next(iter(without.values())))
        tailed = {rank: log for rank, log in logs.items() if log}
        return LogsDest(logs, dict(logs), tailed, {}, files, "", "")


def log_file(folder: str, environ: dict[str, str]) -> Path:
    """Return the log file of the rank with this environment."""
    job = path_part(environ.get("TORCHELASTIC_RUN_ID") or "job")
    return Path(folder) / job / f"attempt-{starts_before(environ)}" / f"rank-{environ['RANK']}.log"


def report_missing_logs(ranks: str, error: OSError) -> None:
    """Report that ranks have no log file, and that they share the launcher's output instead."""
    write_stderr(f"megapar launch: no log file for ranks {ranks}: {error}; they write to the launcher's output instead")


def _created(path: Path) -> Path:
    """Create an empty file at the path and return the path. Renames an existing file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        numbers = [
            int(other.suffix[1:]) for other in path.parent.glob(f"{path.name}.*") if other.suffix[1:].isdecimal()
        ]
        path.rename(path.with_name(f"{path.name}.{max(numbers, default=0) + 1}"))
    path.touch()
    return path
