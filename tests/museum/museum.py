"""The museum of silent bugs: ``python -m tests.museum.museum`` shows that a test of ours fails with each of them.

Each exhibit of exhibits.yaml is made in a copy of the tree, in which its test is run alone. NAMES choose exhibits;
without, CI_SHARE=0 to 7 runs an eighth.

--jobs N    exhibits at a time (2)
--record    write the seconds of the tests that failed to exhibits.yaml, and the page docs/museum.md
--relocate  run nothing: for places that moved, show the lines most like them
--page      run nothing: write docs/museum.md
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.support.shares import is_drawn

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("exhibits.yaml")
LIMIT_SECONDS = 180  # of a killing test; it takes up to 15 s on an idle core
KILLED, SURVIVED = "killed", "survived"


@dataclass(frozen=True)
class Exhibit:
    """A silent bug.

    Attributes:
        name: Short name.
        area: The part of training that it is in.
        kind: The bug.
        source: Public reports of it.
        seen: What users saw.
        killed_by: The test that fails with it.
        change: Lines of context (" "), removed ("-") and added ("+"); "@@" separates places.
        first_loss: Whether the first loss was right.
        seconds: What the test took when it was last recorded, as pytest counts them, beside that of another exhibit.
        blind: For those that were chosen before the tests were read: what the test that came to mind first did.
        written: No test of the suite failed with it: ``killed_by`` was written for it.
    """

    name: str
    area: str
    kind: str
    source: str
    seen: str
    killed_by: str
    change: str
    first_loss: str = "right"
    seconds: float = 0.0
    blind: str = ""
    written: bool = False

    @property
    def replacements(self) -> list[tuple[str, str]]:
        """(old text, new text) of each place, whole lines."""
        found = []
        for place in self.change.split("@@\n"):
            lines = place.splitlines()
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in f" {sign}") for sign in "-+")
            found.append((old, new))
        return found

    def apply(self, tree: Path) -> None:
        """Make the change in the package of a tree. Raises ValueError unless each old text stands at one place."""
        for old, new in self.replacements:
            places = places_of(old, package(tree))
            if len(places) != 1:
                raise ValueError(f"{self.name}: its old text stands at {len(places)} places:\n{old}")
            path = places[0].path
            path.write_text(path.read_text("utf-8").replace(f"\n{old}", f"\n{new}"), "utf-8")


class Found(NamedTuple):
    """Lines of a file: the first one's number, from 1, and their text."""

    path: Path
    line: int
    text: str


def exhibits() -> list[Exhibit]:
    """Return all exhibits."""
    return [Exhibit(**row) for row in yaml.safe_load(TABLE.read_text("utf-8"))]


def package(tree: Path) -> dict[Path, str]:
    """Return the text of each module of a tree's package."""
    return {path: path.read_text("utf-8") for path in sorted((tree / "megapar").rglob("*.py"))}


def places_of(old: str, modules: Mapping[Path, str]) -> list[Found]:
    """Return where whole lines stand."""
    return [
        Found(path, text.count("\n", 0, match.start()) + 2, old)
        for path, text in modules.items()
        for match in re.finditer(re.escape(f"\n{old}"), text)
    ]


def nearest(old: str, modules: Mapping[Path, str]) -> Found:
    """Return the lines, as many as in ``old``, that share most words with it."""

    def words(lines: Sequence[str]) -> set[str]:
        return set(re.findall(r"\w+", " ".join(lines)))

    wanted, size = words(old.splitlines()), len(old.splitlines())
    best, found = -1.0, Found(ROOT, 0, "")
    for path, text in modules.items():
        lines = text.splitlines()
        each = [words([line]) for line in lines]
        for start in range(len(lines) - size + 1):
            here = set().union(*each[start : start + size])
            likeness = len(wanted & here) / max(1, len(wanted | here))
            if likeness > best:
                best, found = likeness, Found(path, start + 1, "\n".join(lines[start : start + size]) + "\n")
    return found


def relocated(exhibit: Exhibit, modules: Mapping[Path, str]) -> str:
    """Return what to write in the place of lines that moved or that stand at several places; "" if none did."""
    told = []
    for old, _ in exhibit.replacements:
        places = places_of(old, modules)
        if len(places) == 1:
            continue
        near = places or [nearest(old, modules)]
        where = ", ".join(f"{found.path.name}:{found.line}" for found in near)
        advice = "add a line of context to one of" if places else "the most alike are"
        told.append(f"{exhibit.name}: {advice} {where}\n{_marked('-', old)}{_marked('=', near[0].text)}")
    return "".join(told)


def _marked(mark: str, text: str) -> str:
    return "".join(f"  {mark}{line}\n" for line in text.splitlines())


def copy_tree(target: Path) -> None:
    """Copy the files that git knows, as they are now."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():  # to a folder: the package's configs
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def verdict(exhibit: Exhibit, clean: Path) -> tuple[str, float]:
    """Return (killed, SURVIVES or broken, the seconds of its test) of an exhibit. clean: A copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(clean, tree, symlinks=True)
        exhibit.apply(tree)
        command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", exhibit.killed_by]
        environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=tree, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "broken: its test does not end", time.monotonic() - start
        counted = re.search(r"^\d+ (?:failed|passed).* in ([\d.]+)s", done.stdout, re.MULTILINE)
        seconds = float(counted[1]) if counted else time.monotonic() - start
    if done.returncode == 1 and "\nFAILED " in done.stdout:
        return KILLED, seconds
    return ("SURVIVES" if done.returncode == 0 else f"broken: {done.stdout[-2000:]}{done.stderr[-2000:]}"), seconds


def recorded(text: str, name: str, seconds: float) -> str:
    """Return the table with the seconds of an exhibit."""
    before, found, after = text.partition(f"- name: {name}\n")
    entry, border, rest = after.partition("\n- name: ")
    entry = re.sub(r"  seconds: .*\n", "", entry)
    entry = entry.replace("  change: ", f"  seconds: {max(seconds, 0.1):.1f}\n  change: ", 1)
    return before + found + entry + border + rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exhibits. Return 1 if one survives, or has moved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    for option in ("record", "relocate", "page"):
        parser.add_argument(f"--{option}", action="store_true")
    options = parser.parse_args(argv)
    wanted = [one for one in exhibits() if (one.name in options.names if options.names else is_drawn(one.name))]
    if options.relocate:
        modules = package(ROOT)
        moved = "".join(relocated(one, modules) for one in wanted)
        print(moved, end="")
        return int(bool(moved))
    alive, seconds = 0, 0.0
    if not options.page:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
            clean = Path(folder)
            copy_tree(clean)
            for one, (text, took) in zip(wanted, pool.map(lambda one: verdict(one, clean), wanted), strict=True):
                alive += text != KILLED
                print(f"{one.name}: {text} in {took:.1f} s by {one.killed_by}", flush=True)
                if text == KILLED:
                    seconds += took
                    if options.record:
                        TABLE.write_text(recorded(TABLE.read_text("utf-8"), one.name, took), "utf-8")
        print(f"{len(wanted) - alive} of {len(wanted)} killed in {seconds:.0f} s")
    if options.record or options.page:
        from tests.museum.page import PAGE, page

        PAGE.write_text(page(exhibits(), package(ROOT)), "utf-8")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
