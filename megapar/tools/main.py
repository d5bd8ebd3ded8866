"""The ``megapar`` command: its subcommands, each imported only when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

from megapar import __version__


def _pretrain(argv: Sequence[str]) -> int:
    from megapar.tools.pretrain import main

    return main(argv)


def _configs(argv: Sequence[str]) -> int:
    from megapar.tools.configs import main

    return main(argv)


def _evaluate(argv: Sequence[str]) -> int:
    from megapar.tools.evaluate import main

    return main(argv)


def _generate(argv: Sequence[str]) -> int:
    from megapar.tools.generate import main

    return main(argv)


def _completion(argv: Sequence[str]) -> int:
    from megapar.tools.completion import main

    return main(argv)


def _rules(argv: Sequence[str]) -> int:
    from megapar.tools.rules import main

    return main(argv)


def _docs(argv: Sequence[str]) -> int:
    from megapar.tools.docs import main

    return main(argv)


def _launch(argv: Sequence[str]) -> int:
    from megapar.tools.launcher.launch import main

    return main(argv)


def _plan(argv: Sequence[str]) -> int:
    from megapar.tools.plan import main

    return main(argv)


def _report(argv: Sequence[str]) -> int:
    from megapar.tools.report import main

    return main(argv)


def _translate(argv: Sequence[str]) -> int:
    from megapar.tools.translate import main

    return main(argv)


def _data(argv: Sequence[str]) -> int:
    from megapar.tools.data import main

    return main(argv)


def _convert(argv: Sequence[str]) -> int:
    from megapar.tools.convert import main

    return main(argv)


COMMANDS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = MappingProxyType(
    {
        "pretrain": (_pretrain, "train a model (moe or ernie) in this process"),
        "launch": (_launch, "check the configuration once, then start the ranks of this node"),
        "plan": (
            _plan,
            "estimate memory, traffic and time of a configuration; --show-schedule draws its pipeline",
        ),
        "configs": (_configs, "list the configurations that --config finds by name"),
        "evaluate": (_evaluate, "print the held-out loss of a checkpoint of any layout"),
        "generate": (_generate, "continue a prompt by a checkpoint of any layout, with transformers"),
        "report": (_report, "write one HTML page about a run"),
        "translate": (
            _translate,
            "translate a launch script of Megatron-LM, MindSpeed, Megatron-DeepSpeed or Paddle into a command",
        ),
        "data": (_data, "make and check token files, train tokenizers"),
        "convert": (_convert, "convert between Hugging Face models and checkpoints"),
        "rules": (_rules, "print the compatibility matrix"),
        "completion": (_completion, "print what completes commands and flags in bash, zsh or fish"),
        "docs": (_docs, "write the generated pages of docs/"),
    }
)


def usage() -> str:
    """Return the text of ``megapar --help``."""
    lines = [f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([f"megapar {__version__}", "usage: megapar COMMAND ...", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0 done, 2 refused, 130 interrupted, others as its --help says."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from megapar.tools.completion import complete

        complete({name: text for name, (_, text) in COMMANDS.items()})
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
    try:
        return COMMANDS[argv[0]][0](argv[1:])
    except KeyboardInterrupt:
        print(f"megapar {argv[0]}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
