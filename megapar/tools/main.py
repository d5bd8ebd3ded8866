"""The ``megapar`` command: its subcommands, each imported only when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType

from megapar import __version__
from megapar.files.paths import MOUNT, REMOTE, is_url
from megapar.tools.packages import packages_or_exit

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "pretrain": ("pretrain", "train a model (moe or ernie) in this process"),
        "launch": ("launcher.launch", "check the configuration once, then start the ranks of this node"),
        "plan": ("plan", "estimate memory, traffic and time of a configuration; --show-schedule draws its pipeline"),
        "configs": ("configs", "list the configurations that --config finds by name"),
        "evaluate": ("evaluate", "print the held-out loss of a checkpoint of any layout"),
        "generate": ("generate", "continue a prompt with a checkpoint of any layout, by transformers"),
        "report": ("report", "write one HTML page about a run"),
        "translate": (
            "translate",
            "translate a launch script of Megatron-LM, MindSpeed, Megatron-DeepSpeed or Paddle into a command",
        ),
        "data": ("data", "make and check token files, train tokenizers"),
        "convert": ("convert", "convert between Hugging Face models and checkpoints"),
        "rules": ("rules", "print the compatibility matrix"),
        "completion": ("completion", "print what completes commands and flags in bash, zsh or fish"),
    }
)
"""Each command's module in this package, whose ``main`` runs it, and its description."""

GROUPS = {
    "train": ("pretrain", "launch", "evaluate", "generate"),
    "look": ("plan", "configs", "report", "data", "rules"),
    "from and to elsewhere": ("translate", "convert"),
    "set up": ("completion",),
}
"""The commands in the order of ``megapar --help``."""
_EXAMPLES = (
    "megapar plan --config mixtral-8x7b --world-size 64      does it fit, how fast is it; needs no GPU",
    "megapar translate train.sh                              a script of Megatron-LM as a command",
    "megapar pretrain moe --config tiny --save runs/tiny     train",
    "megapar report runs/tiny                                look at the run",
)
_ON_PATHS = ("data",)  # whose arguments are paths, never URLs


def usage() -> str:
    """Return the text of ``megapar --help``."""
    lines = [f"megapar {__version__}", "usage: megapar COMMAND ...   (megapar COMMAND --help)", ""]
    lines += [f"  {example}" for example in _EXAMPLES]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:10} {COMMANDS[name][1]}" for name in names)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0 done, 2 refused, 130 interrupted, others as its --help says."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from megapar.tools.completion import complete

        complete(COMMANDS)
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        near = get_close_matches(argv[0], list(COMMANDS), 1)
        hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
        print(f"megapar: {argv[0]} is not a command. {hint}", file=sys.stderr)
        return 2
    if argv[0] in _ON_PATHS and (urls := [word for word in argv if is_url(word) or is_url(word.partition("=")[2])]):
        print(f"megapar {argv[0]}: {REMOTE} (here {urls[0]}). {MOUNT}", file=sys.stderr)
        return 2
    try:
        with packages_or_exit():
            status: int = import_module(f"megapar.tools.{COMMANDS[argv[0]][0]}").main(argv[1:])
        return status
    except KeyboardInterrupt:
        print(f"megapar {argv[0]}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
