"""The program that the ranks of a launch run: a script, or a command of megapar that needs no script.

    megapar launch [OPTIONS] pretrain_moe.py FLAGS     a script
    megapar launch [OPTIONS] pretrain moe FLAGS        ``megapar pretrain``
    megapar launch [OPTIONS] evaluate CHECKPOINT       ``megapar evaluate``

As a module it is what a rank of an elastic job runs: the program, with a layout for the ranks that are present.

    python .../run_module.py megapar.tools.launcher.program REQUESTED_RANKS PROGRAM FLAGS...
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megapar.files.paths import near_path
from megapar.launch_environment import ELASTIC
from megapar.schema.flag import KINDS, SCRIPTS
from megapar.tools.launcher.run_module import module_command

RANK_COMMANDS: Mapping[str, str] = MappingProxyType(
    {"pretrain": "megapar.tools.pretrain", "evaluate": "megapar.tools.evaluate"}
)
"""Commands of megapar that ranks can run, with the module of each; the module is run with a kind and flags."""


@dataclass(frozen=True)
class Program:
    """A program with its flags, taken apart.

    Attributes:
        start: Arguments of the Python interpreter up to the flags.
        kind: Kind of trainer that reads the flags; "" for a script that is not megapar's.
    """

    start: tuple[str, ...]
    flags: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, command: Sequence[str]) -> Program:
        """Take apart the arguments of the Python interpreter, as ``arguments_of`` returns them."""
        words = tuple(command)
        if words[:2] in {module_command(module) for module in RANK_COMMANDS.values()}:
            return cls(words[:3], words[3:], words[2])
        kinds = [kind for kind, script in SCRIPTS.items() if script == Path(words[0]).name]
        return cls(words[:1], words[1:], kinds[0] if kinds else "")


def arguments_of(program: str, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of the Python interpreter for a program of the command line and its flags.

    For ``evaluate`` this reads the small files of the checkpoint. Raises MegaparError if they cannot be used.
    """
    if program not in RANK_COMMANDS:
        return program, *flags
    if program == "evaluate":
        from megapar.tools.evaluate import trainer_line

        flags = trainer_line(flags)
    return *module_command(RANK_COMMANDS[program]), *flags


def complaints_about(program: str, flags: Sequence[str]) -> Iterator[str]:
    """Yield complaints about a program that does not exist."""
    if program == "pretrain":
        from megapar.tools.pretrain import not_a_model

        word = flags[0] if flags else ""
        if word not in KINDS:
            yield not_a_model(word or "nothing").rstrip(".")
    elif program not in RANK_COMMANDS and not Path(program).is_file():
        kinds = [kind for kind, script in SCRIPTS.items() if script == program]
        hint = f"Without a checkout, write pretrain {kinds[0]} in its place" if kinds else near_path(program)
        yield f"script {program} does not exist. {hint}".rstrip(" .")


def wants_warm_start(flag: bool | None, script: str) -> bool:
    """Return True if ranks are to be forked from a warm process.

    On Linux the default is on for megapar's own scripts and commands, if importing torch does not open a device. It is
    off for other scripts: one that sets variables before it imports torch would set them too late.

    Args:
        flag: Value of --warm-start; None for the default.
        script: Path of the script, or a command of megapar.
    """
    if flag is not None:
        return flag
    is_ours = script in RANK_COMMANDS or Path(script).name in SCRIPTS.values()
    # If torch_npu is installed, torch imports it, which opens the device.
    return is_ours and sys.platform == "linux" and importlib.util.find_spec("torch_npu") is None


def with_layout(argv: Sequence[str], ranks: int) -> tuple[list[str], str]:
    """Return (program and flags for ``ranks`` ranks, what changed or ""). Raises LookupError if no layout is legal."""
    requested, program = argv[0], Program.of(argv[1:])
    if not program.kind or ranks == int(requested):
        return [*argv[1:]], ""
    from megapar.planning.variation import nearest

    layout = nearest(program.kind, program.flags, int(requested), ranks)
    if layout is None:
        raise LookupError(f"no layout of {ranks} ranks is legal for this run, which requests {requested}")
    message = f"{ranks} of {requested} ranks are present: {layout.changes}; the global batch is unchanged"
    return [*program.start, *layout.flags], message


def main(argv: Sequence[str]) -> int:
    """Turn this process into the program of a rank of an elastic job. Return 2 if no layout is legal."""
    from megapar.tools.launcher.fresh import become
    from megapar.training.reports.streams import guard_streams

    guard_streams()
    is_first_rank = (os.environ.get("RANK") or "0") == "0"
    try:
        program_and_flags, message = with_layout(argv, int(os.environ["WORLD_SIZE"]))
    except LookupError as error:
        if is_first_rank:
            print(f"megapar launch: {error}", file=sys.stderr)
        return 2
    if message and is_first_rank:
        print(f"megapar launch: {message}", file=sys.stderr, flush=True)
    os.environ[ELASTIC] = "1"
    become(["-u", *program_and_flags])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
