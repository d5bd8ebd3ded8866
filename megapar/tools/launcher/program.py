"""The program that the ranks of a launch run: a script, or a command of megapar that needs no script.

    megapar launch [OPTIONS] pretrain_moe.py FLAGS     a script
    megapar launch [OPTIONS] pretrain moe FLAGS        ``megapar pretrain``
    megapar launch [OPTIONS] evaluate CHECKPOINT       ``megapar evaluate``

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megapar.files.near_path import near_path
from megapar.schema.flag import KINDS, SCRIPTS
from megapar.tools.launcher import own

RANK_COMMANDS: Mapping[str, str] = MappingProxyType(
    {"pretrain": "megapar.tools.pretrain", "evaluate": "megapar.tools.evaluate"}
)
"""Commands of megapar that ranks can run, with the module of each; the module is run with a kind and flags."""


@dataclass(frozen=True)
class Program:
    """A program with its flags, taken apart.

    Attributes:
        start: Arguments of the Python interpreter up to the flags.
        flags: Flags of the program.
        kind: Kind of trainer that reads the flags; "" for a script that is not megapar's.
    """

    start: tuple[str, ...]
    flags: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, command: Sequence[str]) -> Program:
        """Take apart the arguments of the Python interpreter, as ``arguments_of`` returns them."""
        words = tuple(command)
        if words[:2] in {own.module_command(module) for module in RANK_COMMANDS.values()}:
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
    return *own.module_command(RANK_COMMANDS[program]), *flags


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
