"""Sources of a translation: shell scripts, YAML and JSON files, and the command lines in them that start ranks.

A line is taken apart into the program that starts the ranks, the script that they run, and its arguments.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from megapar.config.yaml_file import MAX_BYTES, loader
from megapar.errors import MegaparError
from megapar.files.regular_file import read_given, text_of
from megapar.tools.translation import open_values, shell

# Launchers, by the word (or the module after -m) that names them.
STARTERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch_npu_run": "torchrun",
    "deepspeed": "deepspeed",
    "srun": "srun",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
    "paddle.distributed.launch": "paddle.distributed.launch",
    "fleetrun": "paddle.distributed.launch",
    "msrun": "msrun",
    "accelerate": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
    "colossalai": "colossalai run",
    "ft_launcher": "ft_launcher",
    "python": "python",
    "python3": "python",
}
# Programs in front of a launcher: the number of words that they take, and their options without a value.
WRAPPERS = {
    "python": (0, "-u -O -OO -B -E -s -S -I -q -v"),
    **dict.fromkeys(
        ("docker", "podman"), (2, "--rm -i -t -d -it -ti --privileged --init --interactive --tty --detach")
    ),
    **dict.fromkeys(("singularity", "apptainer"), (2, "--nv --rocm -e -c -C --cleanenv --contain --containall")),
    **dict.fromkeys(
        ("nohup", "exec", "time", "sudo", "env", "nice", "ionice", "numactl", "stdbuf"), (0, "-E -i -l -p")
    ),
    **dict.fromkeys(("nsys", "timeout", "ncu"), (1, "")),
}
_SINGLE = {"-N": "--nodes", "-n": "--ntasks", "-np": "--np", "-H": "--host", "-x": "--x", "-p": "--partition"}
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = " To translate a Python script, pass the command that starts it after --."
YAML, JSON = (".yaml", ".yml"), (".json",)
# Commands that mention a launcher without running it.
_MENTIONS = (
    "echo", "printf", "cat", "which", "command", "type", "pip", "pip3", "export", "alias", "pkill", "killall", "ps",
)  # fmt: skip
_SLURM = {
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}


@dataclass(frozen=True)
class Entry:
    """Entry script of another framework.

    Attributes:
        framework: Key of ``table.NAMES``; empty if the arguments decide.
        model: Kind of the megapar trainer for it; empty if there is none.
    """

    framework: str
    model: str
    what: str


_NOT_HERE = "megapar has no trainer for it"
ENTRIES = {
    "pretrain_gpt.py": Entry("", "moe", "a decoder"),
    "pretrain_llama.py": Entry("", "moe", "a decoder"),
    "pretrain_gpt_core.py": Entry("", "moe", "a decoder"),
    "pretrain_bert.py": Entry("", "", "BERT, an encoder; pretrain_ernie.py trains ERNIE instead"),
    "pretrain_t5.py": Entry("", "", f"T5, an encoder and a decoder; {_NOT_HERE}"),
    "pretrain_ict.py": Entry("", "", f"a retriever; {_NOT_HERE}"),
    "pretrain_retro.py": Entry("", "", f"a decoder with retrieval; {_NOT_HERE}"),
    "pretrain_mamba.py": Entry("", "", f"state-space layers; {_NOT_HERE}"),
    "pretrain_hybrid.py": Entry("", "", f"state-space and attention layers; {_NOT_HERE}"),
    "pretrain_vlm.py": Entry("", "", f"text and images; {_NOT_HERE}"),
    "pretrain_vision_classify.py": Entry("", "", f"images; {_NOT_HERE}"),
    "pretrain_vision_dino.py": Entry("", "", f"images; {_NOT_HERE}"),
    "pretrain_vision_inpaint.py": Entry("", "", f"images; {_NOT_HERE}"),
    "posttrain_gpt.py": Entry("mindspeed", "", "fine-tuning or preference training; megapar only pre-trains"),
    "train_fsdp2.py": Entry("mindspeed", "", "MindSpeed-LLM's FSDP2 trainer, whose arguments are in no table"),
    "train_rl.py": Entry("megatron", "", "reinforcement learning; megapar only pre-trains"),
    "run_pretrain.py": Entry("paddle", "moe", "Paddle's pre-training"),
    "run_pretrain_auto.py": Entry("paddle", "moe", "Paddle's pre-training"),
    "run_finetune.py": Entry("paddle", "", "fine-tuning; megapar only pre-trains"),
}


@dataclass(frozen=True)
class Line:
    """A command line.

    Attributes:
        launcher: (launcher, word) for each word in front of the script.
        script: Path of the script; empty if there are only arguments.
        at: Line number in the file, from 1; 0 without a file.
    """

    arguments: tuple[str, ...]
    launcher: tuple[tuple[str, str], ...] = ()
    script: str = ""
    at: int = 0

    @property
    def starters(self) -> tuple[str, ...]:
        """Launchers, outermost first; python if it is the only one."""
        tools = dict.fromkeys(tool for tool, _ in self.launcher)
        return tuple(tool for tool in tools if tool not in WRAPPERS) or tuple(
            tool for tool in tools if tool == "python"
        )

    @property
    def entry(self) -> Entry | None:
        """Entry of the script in ``ENTRIES``, or None."""
        return ENTRIES.get(PurePosixPath(self.script).name)


def starts(words: Sequence[str]) -> bool:
    """Return True if a command starts ranks or a script with a known name."""
    names = [PurePosixPath(word).name for word in words]
    return (
        any(STARTERS.get(name, "python") != "python" for name in names)
        or any(name in ENTRIES for name in names)
        or _module(words) > 0
    )


def take_apart(words: Sequence[str], at: int = 0) -> Line:
    """Parse a whole command or bare arguments into a line."""
    scripts = [i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    place = next((i for i in scripts if PurePosixPath(words[i]).name in ENTRIES), scripts[0] if scripts else None)
    module = _module(words[:place])
    if module:
        script = _file(words[module]) if _file(words[module]) in ENTRIES else words[module]
        return Line(tuple(words[module + 1 :]), _launcher(words[: module - 1]), script, at)
    if place is None:
        if not words or words[0].startswith("--"):
            return Line(tuple(words), at=at)
        return Line(tuple(words), _launcher(words), at=at) if starts(words) else Line(tuple(words), at=at)
    return Line(tuple(words[place + 1 :]), _launcher(words[:place]), words[place], at)


def _module(words: Sequence[str]) -> int:
    """Return the index of a module that runs as a script, as in torchrun -m pretrain_gpt; 0 if there is none."""
    for place, word in enumerate(words[1:], 1):
        if words[place - 1] not in ("-m", "--module") or word in STARTERS:
            continue
        if _file(word) in ENTRIES or any(STARTERS.get(PurePosixPath(one).name) == "torchrun" for one in words[:place]):
            return place
    return 0


def _file(module: str) -> str:
    return module.rpartition(".")[2] + ".py"


def _launcher(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (program, word) for every word in front of the script; (name, "") for the program itself.

    A word that no known program takes is a program, which may start the ranks.
    """
    found: list[tuple[str, str]] = []
    tool = before = ""
    room = 0  # words besides options that a wrapper still takes
    for word in words:
        name, option = PurePosixPath(word).name, word.startswith("-")
        alone = WRAPPERS.get(tool, (0, ""))[1].split()
        valued = tool in WRAPPERS and before.startswith("-") and "=" not in before and before not in ("-m", *alone)
        free = not tool or (tool in WRAPPERS and not room and not valued)
        known = STARTERS.get(name) or (name if name in WRAPPERS and (free or tool not in WRAPPERS) else "")
        if (known or (free and not ASSIGNED.match(word))) and not option and not valued:
            tool = known or word
            room = WRAPPERS.get(tool, (0, ""))[0]
            found.append((tool, ""))
        elif tool in WRAPPERS or not tool:
            room -= not option and not valued and room > 0
            found += [] if word == "-m" else [(tool or "env", word)]
        elif word != "-m" and f"{before} {word}" != tool:
            found += [(tool, part) for part in _long(word)]
        before = word
    return tuple(found)


def _long(word: str) -> tuple[str, ...]:
    """Expand a short option into the long one."""
    if word.startswith("-") and not word.startswith("--"):
        if word in _SINGLE:
            return (_SINGLE[word],)
        return (f"-{word}",) if len(word) > 2 else (f"--{word[1:]}",)
    return (word,)


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
        positional: Arguments of the shell script: $1, $2, ...; of YAML or JSON, further arguments.
    """
    try:
        text = text_of(read_given(path, MAX_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read: {error}.{_PYTHON if path.suffix == '.py' else ''}") from None
    if path.suffix == ".py":
        return _of_strategy(path, text)
    if path.suffix in (*YAML, *JSON):
        return Script((Line((*_words(_mapping(path, text)), *positional)),))
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
    return Script(tuple(dict.fromkeys(started)), found.remarks)  # once for each, of a loop


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
