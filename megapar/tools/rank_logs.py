"""Where ranks' output goes with ``--log-dir DIR``: DIR/JOB/attempt-K/rank-N.log, by the job's name and global ranks.

Nodes that share the folder write beside one another. A file of an earlier launch by the same name is kept as
rank-N.log.1, .2 and so on, the newest last.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from megapar.config.launched import starts_before


class RankLogs(LogsSpecs):
    """For torch's agent. log_dir: "" leaves ranks the launcher's own output."""

    def __init__(self, log_dir: str = "") -> None:
        super().__init__(log_dir or None)
        self._errors = tempfile.TemporaryDirectory(prefix="megapar-errors-", ignore_cleanup_errors=True)
        self._starts = 0
        if log_dir:
            Path(log_dir).mkdir(parents=True, exist_ok=True)

    @property
    def root_log_dir(self) -> str:
        """As torch has it."""
        return str(self._root_log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files of the next start, by local rank. envs: of the ranks; each hears where it is to tell what ended it."""
        errors = Path(self._errors.name) / str(self._starts)
        errors.mkdir()
        self._starts += 1
        logs = dict.fromkeys(envs, "")
        files = {}
        for rank, environ in envs.items():
            files[rank] = environ["TORCHELASTIC_ERROR_FILE"] = str(errors / f"{rank}.json")
            if self._root_log_dir:
                logs[rank] = str(_free(log_file(self._root_log_dir, {**os.environ, **environ})))
        shown = {rank: log for rank, log in logs.items() if log}
        return LogsDest(logs, dict(logs), shown, {}, files, "", "")


def log_file(folder: str, environ: dict[str, str]) -> Path:
    """The file of the rank that has this environment."""
    job = re.sub(r"[^\w.-]", "_", environ.get("TORCHELASTIC_RUN_ID", "")).lstrip(".") or "job"
    return Path(folder) / job / f"attempt-{starts_before(environ)}" / f"rank-{environ['RANK']}.log"


def _free(path: Path) -> Path:
    """The path, with what is there renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        numbers = [
            int(other.suffix[1:]) for other in path.parent.glob(f"{path.name}.*") if other.suffix[1:].isdecimal()
        ]
        path.rename(path.with_name(f"{path.name}.{max(numbers, default=0) + 1}"))
    return path
