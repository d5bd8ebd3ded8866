"""What is given to be translated: a shell script, a YAML or a JSON file; and the lines in it that start something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megapar.config.regular_file import read_given, text_of
from megapar.config.text_form import MAX_BYTES, loader
from megapar.errors import MegaparError
from megapar.tools.translation import shell
from megapar.tools.translation.line import Line, starts, take_apart

YAML, JSON = (".yaml", ".yml"), (".json",)
# Commands that name a starter without running it.
_TALK = (
    "echo",
    "printf",
    "cat",
    "which",
    "command",
    "type",
    "pip",
    "pip3",
    "export",
    "alias",
    "pkill",
    "killall",
    "ps",
)


_SLURM = {
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}


class UnreadableError(MegaparError):
    """What was given cannot be translated; the message says where and what to do."""

    exit_status = 2


@dataclass(frozen=True)
class Script:
    """lines: what starts ranks, in order. remarks: what was taken for granted."""

    lines: tuple[Line, ...]
    remarks: tuple[str, ...] = ()


def read_source(path: Path, assigned: Mapping[str, str], positional: Sequence[str]) -> Script:
    """The lines of a file. Raises UnreadableError.

    assigned: variables of a shell script from outside. positional: its $1, $2, ...
    """
    if path.suffix == ".py":
        raise UnreadableError(f"{path.name} is a Python script: give the line that starts it behind --")
    try:
        text = text_of(read_given(path, MAX_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from None
    if path.suffix in (*YAML, *JSON):
        return Script((Line(tuple(_words(_mapping(path, text)))),))
    try:
        found = shell.read(text, {**_of_slurm(text), **assigned}, positional)
    except (shell.SyntaxProblem, RecursionError) as error:
        raise UnreadableError(f"{path}: {error}") from None
    lines = [
        take_apart(words, at) for at, words in found.commands if Path(words[0]).name not in _TALK and starts(words)
    ]
    started = [line for line in lines if line.script]
    if not started:
        reason = f"line {lines[0].at} names no script to start" if lines else "nothing in it starts a training script"
        raise UnreadableError(f"{path}: {reason}.{_called(found.commands)}")
    return Script(tuple(started), found.remarks)


def _of_slurm(text: str) -> dict[str, str]:
    """The variables that Slurm sets by the script's own ``#SBATCH`` lines."""
    words = [word for line in re.findall(r"^#SBATCH[ \t]+(.+)$", text, re.MULTILINE) for word in line.split()]
    options: dict[str, str] = dict(pairwise(words))
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            options[name] = value
    found: dict[str, str] = {}
    for option, names in _SLURM.items():
        value = options.get(option, "")
        if value.isdigit():
            found |= dict.fromkeys(names, value)
    return found


def _called(commands: Sequence[tuple[int, tuple[str, ...]]]) -> str:
    """A hint where the script calls another one."""
    for at, words in commands:
        script = next((word for word in words[:3] if word.endswith(".sh")), None)
        if script is not None:
            return f" Line {at} calls {script}: translate that one, with its arguments behind --."
    return ""


def _mapping(path: Path, text: str) -> Mapping[str, Any]:
    """A file's keys and values, which are texts, lists or mappings. Raises UnreadableError."""
    import yaml

    try:
        # A base loader leaves every scalar the text that it is; JSON is YAML to it, but for tabs.
        loaded = json.loads(text) if path.suffix in JSON else loader(yaml.BaseLoader)(text).get_single_data()
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UnreadableError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict) or not loaded:
        raise UnreadableError(f"{path} has no keys with values")
    return loaded


def _words(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Keys as arguments, those of a nested mapping with a dot."""
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _words(value, f"{name}.")
            continue
        yield f"--{name}"
        yield from (_word(item) for item in (value if isinstance(value, list) else [value]))


def _word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
