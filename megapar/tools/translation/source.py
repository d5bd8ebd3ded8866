"""Sources of a translation: shell scripts, YAML and JSON files, and the command lines in them that start ranks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megapar.config.text_form import MAX_BYTES, loader
from megapar.errors import MegaparError
from megapar.files.regular_file import read_given, text_of
from megapar.tools.translation import open_values, shell
from megapar.tools.translation.line import Line, starts, take_apart

_PYTHON = " To translate a Python script, pass the command that starts it after --."
YAML, JSON = (".yaml", ".yml"), (".json",)
# Commands that mention a launcher without running it.
_MENTIONS = (
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
    """The source cannot be translated. The message contains the location and what to do."""

    exit_status = 2


@dataclass(frozen=True)
class Script:
    """The command lines of a source.

    Attributes:
        lines: Command lines that start ranks, in order.
        remarks: Assumptions that were made to read the source.
    """

    lines: tuple[Line, ...]
    remarks: tuple[str, ...] = ()


def read_source(path: Path, assigned: Mapping[str, str], positional: Sequence[str]) -> Script:
    """Return the command lines of a file. Raises UnreadableError if there are none.

    Args:
        path: Shell script, YAML or JSON file.
        assigned: Variables of the shell script that are set from outside.
        positional: Arguments of the shell script: $1, $2, ...
    """
    try:
        text = text_of(read_given(path, MAX_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read: {error}.{_PYTHON if path.suffix == '.py' else ''}") from None
    if path.suffix == ".py":
        return _of_strategy(path, text)
    if path.suffix in (*YAML, *JSON):
        return Script((Line(tuple(_words(_mapping(path, text)))),))
    try:
        found = shell.read(text, {**_of_slurm(text), **assigned}, positional)
    except (shell.SyntaxProblem, RecursionError) as error:
        raise UnreadableError(f"{path}: {error}") from None
    lines = [
        take_apart(words, at) for at, words in found.commands if Path(words[0]).name not in _MENTIONS and starts(words)
    ]
    started = [line for line in lines if line.script]
    if not started:
        reason = f"line {lines[0].at} does not name a script" if lines else "nothing in it starts a training script"
        raise UnreadableError(f"{path}: {reason}.{_called(found.commands)}")
    return Script(tuple(started), found.remarks)


def _of_strategy(path: Path, text: str) -> Script:
    """Return what a Python file assigns to a Paddle strategy (``strategy.sharding_configs = {...}``). Runs nothing."""
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from None
    found: dict[str, Any] = {}
    remarks = []
    for node in sorted(nodes, key=lambda node: node.lineno):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and ast.unparse(target.value).endswith("strategy"):
            if target.attr in found:
                remarks.append(f"line {node.lineno}: {target.attr} is assigned again; the last one counts")
            found[target.attr] = _constant(node.value)
    if not found:
        raise UnreadableError(f"{path.name} sets no strategy.{_PYTHON}")
    return Script((Line(tuple(_words(found))),), tuple(remarks))


def _constant(node: ast.expr) -> Any:
    """Return a dictionary, list or constant; marks in place of what only Python can compute."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_constant(key)) if key else "**": _constant(value) for key, value in pairs}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return open_values.mark(ast.unparse(node))


def _of_slurm(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets from the ``#SBATCH`` lines of the script."""
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
    """Return a hint if the script calls another script."""
    for at, words in commands:
        script = next((word for word in words[:3] if word.endswith(".sh")), None)
        if script is not None:
            return f" Line {at} calls {script}: translate that script, with its arguments after --."
    return ""


def _mapping(path: Path, text: str) -> Mapping[str, Any]:
    """Return the keys and values of a file; values are strings, lists or mappings. Raises UnreadableError."""
    import yaml

    try:
        # BaseLoader keeps every scalar as a string. It does not read JSON with tabs, so JSON is parsed as JSON.
        loaded = json.loads(text) if path.suffix in JSON else loader(yaml.BaseLoader)(text).get_single_data()
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UnreadableError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict) or not loaded:
        raise UnreadableError(f"{path} has no keys with values")
    return loaded


def _words(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield keys and values as arguments; keys of nested mappings are joined with dots."""
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
