"""Parsed command lines: the program that starts the ranks, the script that they run, and its arguments.

Tested in ``tests/tools/test_translate.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

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
    "python": "python",
    "python3": "python",
}
_SINGLE = {"-N": "--nodes", "-n": "--ntasks", "-np": "--np", "-H": "--host", "-x": "--x", "-p": "--partition"}
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Entry:
    """Entry script of another framework.

    Attributes:
        framework: Key of ``table.NAMES``; empty if the arguments decide.
        model: Kind of the megapar trainer for it; empty if there is none.
        what: Description of its model or task.
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
    "train_rl.py": Entry("megatron", "", "reinforcement learning; megapar only pre-trains"),
    "run_pretrain.py": Entry("paddle", "moe", "Paddle's pre-training"),
    "run_pretrain_auto.py": Entry("paddle", "moe", "Paddle's pre-training"),
    "run_finetune.py": Entry("paddle", "", "fine-tuning; megapar only pre-trains"),
}


@dataclass(frozen=True)
class Line:
    """A command line.

    Attributes:
        arguments: Arguments of the script.
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
        tools = tuple(dict.fromkeys(tool for tool, _ in self.launcher))
        return tuple(tool for tool in tools if tool != "python") or tools

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
    place = next((i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), None)
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
    """Return (launcher, word) for every word in front of the script; (name, "") for the launcher itself."""
    found: list[tuple[str, str]] = []
    tool = ""
    for word in words:
        name = STARTERS.get(PurePosixPath(word).name)
        if name is not None and not word.startswith("--"):
            tool = name
            found.append((tool, ""))
        elif tool and word != "-m":
            found += [(tool, part) for part in _long(word, tool)]
    return tuple(found)


def _long(word: str, tool: str) -> tuple[str, ...]:
    """Expand a short option into the long one; return nothing for assignments of environment variables."""
    if tool == "python" or ASSIGNED.match(word):
        return ()
    if word.startswith("-") and not word.startswith("--"):
        if word in _SINGLE:
            return (_SINGLE[word],)
        return (f"-{word}",) if len(word) > 2 else (f"--{word[1:]}",)
    return (word,)
