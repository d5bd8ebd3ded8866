"""Where ranks' output goes with ``--log-dir DIR``: DIR/JOB/attempt-K/rank-N.log, by the job's name and global ranks.

Nodes that share the folder write beside one another. A file of an earlier launch by the same name is kept as
rank-N.log.1, .2 and so on, the newest last. A rank whose file cannot be opened has none: logs end no run.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from megapar.config.launched import starts_before
from megapar.core.health.signal_listener import write_stderr


class RankLogs(LogsSpecs):
    """For torch's agent. log_dir: "" leaves ranks the launcher's own output."""

    def __init__(self, log_dir: str = "") -> None:
        super().__init__(log_dir or None)
        self._errors = tempfile.TemporaryDirectory(prefix="megapar-errors-", ignore_cleanup_errors=True)
        self._starts = 0

    @property
    def root_log_dir(self) -> str:
        """As torch has it."""
        return str(self._root_log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files of the next start, by local rank. envs: of the ranks; each hears where it is to tell what ended it."""
        errors = Path(self._errors.name) / str(self._starts)
        with contextlib.suppress(OSError):  # ranks that cannot write there either say what ended them, and no more
            errors.mkdir()
        self._starts += 1
        logs = dict.fromkeys(envs, "")
        files, without = {}, {}
        for rank, environ in envs.items():
            files[rank] = environ["TORCHELASTIC_ERROR_FILE"] = str(errors / f"{rank}.json")
            if self._root_log_dir:
                try:
                    logs[rank] = str(_made(log_file(self._root_log_dir, {**os.environ, **environ})))
                except OSError as error:
                    without[environ["RANK"]] = error
        if without:
            say_without(", ".join(without), next(iter(without.values())))
        shown = {rank: log for rank, log in logs.items() if log}
        return LogsDest(logs, dict(logs), shown, {}, files, "", "")


def log_file(folder: str, environ: dict[str, str]) -> Path:
    """The file of the rank that has this environment."""
    job = re.sub(r"[^\w.-]", "_", environ.get("TORCHELASTIC_RUN_ID", "")).lstrip(".") or "job"
    return Path(folder) / job / f"attempt-{starts_before(environ)}" / f"rank-{environ['RANK']}.log"


def say_without(ranks: str, error: OSError) -> None:
    """That ranks have no file, and where they write instead."""
    write_stderr(f"megapar launch: no log file for ranks {ranks}: {error}; their output goes where the launcher's goes")


def _made(path: Path) -> Path:
    """The path, with what was there renamed and an empty file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        numbers = [
            int(other.suffix[1:]) for other in path.parent.glob(f"{path.name}.*") if other.suffix[1:].isdecimal()
        ]
        path.rename(path.with_name(f"{path.name}.{max(numbers, default=0) + 1}"))
    path.touch()
    return path
