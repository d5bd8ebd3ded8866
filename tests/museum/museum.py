"""The museum of silent bugs: ``python -m tests.museum.museum`` shows that a test of ours fails with each of them.

Each exhibit of exhibits.yaml is made in a copy of the tree, in which its test is run alone. NAMES choose exhibits;
without, CI_SHARE=0 to 7 runs an eighth.

--jobs N    exhibits at a time (2)
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.shares import is_drawn

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 180  # of a killing test; it takes up to 15 s on an idle core


@dataclass(frozen=True)
class Exhibit:
    """A silent bug.

    Attributes:
        name: Short name.
        kind: The bug.
        source: Public reports of it.
        seen: What users saw.
        killed_by: The test that fails with it.
        change: Lines of context (" "), removed ("-") and added ("+"); "@@" separates places.
        first_loss: Whether the first loss was right.
    """

    name: str
    kind: str
    source: str
    seen: str
    killed_by: str
    change: str
    first_loss: str = "right"

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
            files = [path for path in (tree / "megapar").rglob("*.py") if f"\n{old}" in path.read_text("utf-8")]
            if len(files) != 1 or files[0].read_text("utf-8").count(f"\n{old}") != 1:
                raise ValueError(f"{self.name}: its old text stands in {len(files)} files, or more than once:\n{old}")
            files[0].write_text(files[0].read_text("utf-8").replace(f"\n{old}", f"\n{new}"), "utf-8")


def exhibits() -> list[Exhibit]:
    """Return all exhibits."""
    return [Exhibit(**row) for row in yaml.safe_load((Path(__file__).parent / "exhibits.yaml").read_text("utf-8"))]


def copy_tree(target: Path) -> None:
    """Copy the files that git knows, as they are now."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def verdict(exhibit: Exhibit, clean: Path) -> tuple[str, float]:
    """Return (killed, survives or broken, the seconds of its test) of an exhibit. clean: A copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(clean, tree)
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
        seconds = time.monotonic() - start
    if done.returncode == 1 and "\nFAILED " in done.stdout:
        return "killed", seconds
    return ("SURVIVES" if done.returncode == 0 else f"broken: {done.stdout[-2000:]}{done.stderr[-2000:]}"), seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exhibits. Return 1 if one survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    wanted = [one for one in exhibits() if (one.name in options.names if options.names else is_drawn(one.name))]
    alive = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        clean = Path(folder)
        copy_tree(clean)
        for one, (text, seconds) in zip(wanted, pool.map(lambda one: verdict(one, clean), wanted), strict=True):
            alive += text != "killed"
            print(f"{one.name}: {text} in {seconds:.0f} s by {one.killed_by}", flush=True)
    print(f"{len(wanted) - alive} of {len(wanted)} killed")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
