#!/usr/bin/env python3
"""Read a Dockerfile, and perform its steps in a folder that holds the base system. Standard library only.

scripts/dockerfile.py docker/cpu.Dockerfile --root FOLDER [--build-arg NAME=VALUE]

A step is ARG, ENV, COPY (without options), WORKDIR, RUN or USER; RUN runs in a chroot as the user of the last USER.
This is what docker build does, without layers, and needs root. scripts/docker_cpu.sh makes the folder and calls it.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KEYWORDS = ("FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "CMD")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile.

    Attributes:
        keyword: Its keyword, in capitals.
        value: The rest, with continued lines joined by a space.
        line: Number of its first line.
    """

    keyword: str
    value: str
    line: int


@dataclass
class Place:
    """State that steps leave behind.

    Attributes:
        variables: Variables of ARG and ENV, which later steps see.
        folder: Working directory.
        user: User of RUN.
    """

    variables: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    folder: str = "/"
    user: str = "root"


def steps(text: str) -> Iterator[Step]:
    """Yield the instructions of a Dockerfile. Raises ValueError for a keyword that is not in ``KEYWORDS``."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not parts and not line.strip()):
            continue
        first = first if parts else number
        parts.append(line.rstrip().removesuffix("\\").strip())
        if line.rstrip().endswith("\\"):
            continue
        keyword, _, value = " ".join(parts).partition(" ")
        if keyword not in KEYWORDS:
            raise ValueError(f"line {first}: {keyword} is not one of {', '.join(KEYWORDS)}")
        yield Step(keyword, value.strip(), first)
        parts = []
    if parts:
        raise ValueError(f"line {first}: the last instruction does not end")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace $NAME and ${NAME}; a variable that is not set is empty."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def assignments(value: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ENV: NAME=VALUE pairs without blanks. All are expanded by what was set before."""
    return {name: expanded(text, variables) for name, _, text in (pair.partition("=") for pair in value.split())}


def context_files(root: Path) -> list[Path]:
    """Return the files of the build context, relative to it: all but those of ``.dockerignore``."""
    ignored = root / ".dockerignore"
    lines = ignored.read_text(encoding="utf-8").splitlines() if ignored.exists() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    found = []
    for folder, names, files in os.walk(root):
        at = Path(folder).relative_to(root)
        names[:] = [name for name in names if _kept(at / name, patterns, folder=True)]
        found += [at / name for name in files if _kept(at / name, patterns)]
    return sorted(found)


def _kept(path: Path, patterns: Sequence[str], *, folder: bool = False) -> bool:
    """Return True if the last pattern that matches a path or a folder above it is an exception, or none matches."""
    kept = True
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if _matches(path, wanted):
            kept = pattern.startswith("!")
        elif folder and pattern.startswith("!") and wanted.startswith(f"{path}/"):
            kept = True  # something in it may be kept
    return kept


def _matches(path: Path, pattern: str) -> bool:
    every = [path, *path.parents][:-1]
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(one.name, pattern[3:]) for one in every)
    depth = pattern.count("/")
    return any(len(one.parts) == depth + 1 and fnmatch.fnmatchcase(str(one), pattern) for one in every)


class Build:
    """The steps of a Dockerfile in a folder.

    Attributes:
        place: What the steps so far have set.

    Args:
        context: Folder that COPY reads.
        root: Folder with the base system.
        arguments: Values of ARG, instead of the defaults.
    """

    def __init__(self, context: Path, root: Path, arguments: Mapping[str, str]) -> None:
        self.place = Place()
        self._context, self._root, self._arguments = context, root, arguments

    def perform(self, step: Step) -> None:
        """Perform a step. Raises CalledProcessError if a command fails, and FileNotFoundError for a missing source."""
        variables = self.place.variables
        if step.keyword == "ARG":
            name, _, default = step.value.partition("=")
            variables[name] = self._arguments.get(name, expanded(default, variables))
        elif step.keyword == "ENV":
            variables |= assignments(step.value, variables)
        elif step.keyword == "WORKDIR":
            self.place.folder = expanded(step.value, variables)
            self._inside(self.place.folder).mkdir(parents=True, exist_ok=True)
        elif step.keyword == "USER":
            self.place.user = step.value
        elif step.keyword == "COPY":
            *sources, target = step.value.split()
            self._copy(sources, target)
        elif step.keyword == "RUN":
            self.run(step.value)

    def run(self, command: str) -> None:
        """Run a shell command in the folder as the user that is set."""
        user, group, home = self._identity()
        environment = {**self.place.variables, "HOME": home, "FOLDER": self.place.folder}
        within = 'cd "$FOLDER" && unset FOLDER && ' + command
        options = [f"--userspec={user}:{group}", f"--groups={group}"]
        subprocess.run(["chroot", *options, str(self._root), "/bin/sh", "-c", within], env=environment, check=True)

    def _identity(self) -> tuple[str, str, str]:
        """Return the numbers of user and group, and the home, from the folder's own list of users."""
        for line in (self._root / "etc/passwd").read_text(encoding="utf-8").splitlines():
            name, _, user, group, _, home, _ = line.split(":")
            if self.place.user in (name, user):
                return user, group, home
        raise KeyError(f"USER {self.place.user} is not in /etc/passwd")

    def _copy(self, sources: Sequence[str], target: str) -> None:
        kept = context_files(self._context)
        for source in sources:
            base = Path(source)
            files = [path for path in kept if base in (Path("."), path, *path.parents)]
            if not files:
                raise FileNotFoundError(f"COPY {source}: the context has no such file")
            for path in files:
                inner = path.relative_to(base) if path != base else Path(path.name)
                single = path == base and len(sources) == 1 and not target.endswith("/")
                to = self._inside(target) if single else self._inside(target) / inner
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._context / path, to, follow_symlinks=False)
                os.chown(to, 0, 0, follow_symlinks=False)

    def _inside(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def main(argv: Sequence[str]) -> int:
    """Perform the steps of a Dockerfile, and print the seconds of each. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Perform the steps of a Dockerfile in a folder.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--root", type=Path, required=True, help="folder with the base system")
    parser.add_argument("--context", type=Path, default=Path("."), help="folder that COPY reads")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--then", action="append", default=[], metavar="COMMAND", help="also run this at the end")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="pass a variable on to commands")
    args = parser.parse_args(list(argv))
    if pwd.getpwuid(os.getuid()).pw_name != "root":
        sys.stderr.write("dockerfile.py: chroot needs root\n")
        return 2
    build = Build(args.context, args.root, dict(pair.split("=", 1) for pair in args.build_arg))
    build.place.variables |= {name: os.environ[name] for name in args.env if name in os.environ}
    every = [step for step in steps(args.file.read_text(encoding="utf-8")) if step.keyword not in ("FROM", "CMD")]
    for step in [*every, *(Step("RUN", command, 0) for command in args.then)]:
        start = time.monotonic()
        print(f"{step.keyword} {step.value}", flush=True)
        try:
            build.perform(step)
        except (subprocess.CalledProcessError, OSError, KeyError) as error:
            sys.stderr.write(f"{args.file}:{step.line}: {error}\n")
            return 1
        print(f"    {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
