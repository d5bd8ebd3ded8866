"""The hook that makes torch's agent fork ranks from a warm process."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from megapar.tools.launcher.rank_logs import report_missing_logs
from megapar.tools.launcher.warm import Warm, adopt_orphans


class Handler(SubprocessHandler):
    """torch's handler of a rank's process. It forks the rank if possible, and both streams may share a log file."""

    def __init__(self, warm: Warm | None, stdout: str | None, stderr: str | None, **rest: Any) -> None:
        self._warm = warm
        self._paths = stdout, stderr
        super().__init__(stdout=None, stderr=None, **rest)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        try:
            self._stdout, self._stderr = (_opened(path) for path in self._paths)
        except OSError as error:  # RankLogs created the file, but its disk may have failed since
            report_missing_logs(env["RANK"], error)
            self._stdout = self._stderr = None
        files = [1 if self._stdout is None else self._stdout.fileno()]
        files += [2 if self._stderr is None else self._stderr.fileno()]
        if self._warm is not None:
            forked = self._warm.fork(args[1:], env, *files)
            if forked is not None:
                return forked
        process: subprocess.Popen[bytes] = super()._popen(args, env)
        return process


def _opened(path: str | None) -> TextIOWrapper | None:
    return open(path, "a", encoding="utf-8") if path else None


@contextlib.contextmanager
def starting_with(warm: Warm | None) -> Iterator[None]:
    """Make torch's agent start its ranks through ``Handler``. Its ``start_processes`` has no parameter for this."""

    def make(
        entrypoint: str,
        args: tuple[str, ...],
        env: Mapping[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: Any = None,
    ) -> Handler:
        return Handler(
            warm, stdout, stderr, entrypoint=entrypoint, args=args, env=env, local_rank_id=local_rank_id,
            numa_options=numa_options,
        )  # fmt: skip

    original = api.get_subprocess_handler
    api.get_subprocess_handler = make
    try:
        with adopt_orphans() if warm is not None else contextlib.nullcontext():
            yield
    finally:
        api.get_subprocess_handler = original
