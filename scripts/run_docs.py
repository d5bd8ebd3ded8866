#!/usr/bin/env python3
"""Run the commands of the README and of docs/ as printed, and report a failed command with its page and line.

    scripts/run_docs.py                     every page
    scripts/run_docs.py --page data.md      one page (may be repeated)
    scripts/run_docs.py --jobs 2            two pages at once

Blocks fenced with ```bash and ```python run. ```bash no-run marks commands that need other machines, files or hours,
and ```bash status=2 marks commands that exit with this status. The commands of a page share one shell, in a new folder
that looks like a checkout. Pages share only the cache of tokenizers. Every page of docs/ has a command that runs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "@@ line "
LIMIT_SECONDS = 300
"""Time limit of a page."""


class PageError(Exception):
    """A page cannot be parsed into commands, or one of its commands failed."""


@dataclass(frozen=True)
class Command:
    """A shell command, its first line on the page, and its expected exit status."""

    line: int
    text: str
    status: int = 0


def commands(page: str) -> list[Command]:
    """Return the commands of a page that run, in order. Raises PageError if the page cannot be parsed."""
    found = []
    for line, language, words, text in _blocks(page):
        if "no-run" in words:
            continue
        status = next((int(word[7:]) for word in words if word.startswith("status=")), 0)
        if language == "bash":
            found += [Command(at, one, status) for at, one in _split(line + 1, text)]
        elif language == "python":
            found.append(Command(line + 1, f"python - <<'END_OF_BLOCK'\n{text}\nEND_OF_BLOCK", status))
    return found


def _blocks(page: str) -> Iterator[tuple[int, str, list[str], str]]:
    """Yield (line of the fence, language, further words, text) of every fenced block."""
    lines = page.splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"```(\w*)(.*)$", lines[at])
        if fence is None:
            at += 1
            continue
        end = next((n for n in range(at + 1, len(lines)) if lines[n].rstrip() == "```"), None)
        if end is None:
            raise PageError(f"line {at + 1}: the block has no end")
        yield at + 1, fence[1], fence[2].split(), "\n".join(lines[at + 1 : end])
        at = end + 1


def _split(first: int, text: str) -> Iterator[tuple[int, str]]:
    """Yield the commands of a block with their lines; continued lines and here-documents stay together."""
    held: list[str] = []
    for number, line in enumerate(text.splitlines(), first):
        if not held and (not line.strip() or line.lstrip().startswith("#")):
            continue
        held.append(line)
        command = "\n".join(held)
        if not line.endswith("\\") and _is_whole(command):
            yield number - len(held) + 1, command
            held = []
    if held:
        raise PageError(f"line {first}: the block ends inside a command: {held[0]}")


def _is_whole(command: str) -> bool:
    parsed = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
    return parsed.returncode == 0 and "here-document" not in parsed.stderr


def script(wanted: Sequence[Command]) -> str:
    """Return a shell script that marks each command in its output and stops at the first failure."""
    parts = ["set -o pipefail"]
    for command in wanted:
        parts += [f'echo "{MARK}{command.line}, at $SECONDS s"', command.text]
        parts.append(f's=$?; [ $s -eq {command.status} ] || {{ echo "exit status $s, not {command.status}"; exit 1; }}')
    return "\n".join(parts) + "\n"


def run_page(
    path: Path,
    work: Path,
    *,
    limit: float = LIMIT_SECONDS,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda shell: None,
) -> tuple[int, float]:
    """Run a page in ``work``. Return (number of commands, seconds). Raises PageError with line, command and output.

    Args:
        path: The page.
        work: Folder for the page's own folder and its output.
        limit: Time limit in seconds.
        started: Called with the page's shell, which leads a process group.
    """
    wanted = commands(path.read_text(encoding="utf-8"))
    folder = work / path.stem
    folder.mkdir(parents=True)
    for entry in ROOT.iterdir():  # link the checkout; outputs of the commands stay in the folder
        if entry.name not in (".git", "runs", "tokens"):
            (folder / entry.name).symlink_to(entry)
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(sys.prefix)
    page, output = work / f"{path.stem}.sh", work / f"{path.stem}.log"
    page.write_text(script(wanted), encoding="utf-8")
    start = time.monotonic()
    with output.open("wb") as stream:
        shell = subprocess.Popen(
            ["bash", str(page)],
            cwd=folder,
            env=_environment(work),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started(shell)
        try:
            status = shell.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # no process survives, even if this script is stopped
            _end(shell)
    if status != 0:
        printed = output.read_text(encoding="utf-8", errors="replace")
        reason = f"cut off after {limit:g} s" if status is None else f"killed by signal {-status}" if status < 0 else ""
        raise PageError(_failure(wanted, printed, reason))
    return len(wanted), time.monotonic() - start


def _end(shell: subprocess.Popen[bytes]) -> None:
    """Kill a shell, and what its page has left in the background."""
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()


def run_pages(paths: Sequence[Path], work: Path, jobs: int) -> int:
    """Run pages, ``jobs`` at once, and print how each one ended, in their order. Return the number that failed."""
    failed = 0
    shells: list[subprocess.Popen[bytes]] = []
    pool = ThreadPoolExecutor(jobs)
    running = {path: pool.submit(run_page, path, work, started=shells.append) for path in paths}
    try:
        for path, outcome in running.items():
            name = path.relative_to(ROOT)
            try:
                count, seconds = outcome.result()
                if not count:
                    raise PageError("no command that runs")
                print(f"{name}: {count} command{'s' if count > 1 else ''} in {seconds:.1f} s", flush=True)
            except PageError as error:
                failed += 1
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for shell in shells:  # none is left unless this script is stopped
            if shell.poll() is None:
                _end(shell)
        pool.shutdown()
    return failed


def _environment(work: Path) -> dict[str, str]:
    """Return a reader's environment: activated, with an empty cache and without downloads."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    cache = {"XDG_CACHE_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **cache, "PATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _failure(wanted: Sequence[Command], output: str, reason: str) -> str:
    """Return the last command that was started, with its output."""
    _, _, last = output.rpartition(MARK)
    mark, _, printed = last.partition("\n")
    number = mark.partition(",")[0]
    command = next((one.text for one in wanted if str(one.line) == number), "")
    tail = "\n".join(f"    {line}" for line in printed.strip().splitlines()[-30:])
    return "\n".join([f"line {number}: {command}", *([f"    {reason}"] if reason else []), tail])


def pages(names: Sequence[str]) -> list[Path]:
    """Return the pages with these names, or all pages. Raises PageError if a page does not exist."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    known = {path.name: path for path in every}
    known |= {path.stem: path for path in every}
    missing = [name for name in names if Path(name).name not in known]
    if missing:
        raise PageError(f"no such page: {', '.join(missing)}. Pages: {', '.join(path.name for path in every)}")
    return [known[Path(name).name] for name in names] or every


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pages. Return 0 if all of them succeeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="append", default=[], metavar="NAME", help="only this page")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="pages that run at once")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this folder and keep it")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="megapar-docs-") as temporary:
        work = options.keep.absolute() if options.keep else Path(temporary)
        try:
            wanted = pages(options.page)
        except PageError as error:
            print(error, file=sys.stderr)
            return 2
        return 1 if run_pages(wanted, work, options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
