"""``megapar pretrain``: the trainers as a command. The entry scripts and the ranks of a launch run it as well.

megapar pretrain moe|ernie [FLAGS]
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from megapar.arguments import KINDS, SCRIPTS, Config, parse_or_exit
from megapar.config.report import EXAMPLES
from megapar.health.stop.parent import end_with_launcher
from megapar.tools.packages import check_torch, packages_or_exit
from megapar.training.loop.outline import outline

MODELS = {"moe": "a mixture-of-experts or dense decoder", "ernie": "an ERNIE encoder"}
"""The trainers by the word that selects them, with what they train."""


def main(argv: Sequence[str]) -> int:
    """Train, and exit as ``pretrain`` does. Returns only for --help (0) and without the name of a model (2)."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in KINDS:
        print(f"megapar pretrain: {not_a_model(argv[0])}", file=sys.stderr)
        return 2
    pretrain(argv[0], argv[1:])


def usage() -> str:
    """Return the text of ``megapar pretrain --help``; that of a trainer lists its flags."""
    lines = [f"  {kind:6} {text}; its flags: megapar pretrain {kind} --help" for kind, text in MODELS.items()]
    examples = [f"  {EXAMPLES[kind][0][0]}" for kind in MODELS]
    usage = ["", "usage: megapar pretrain MODEL [--config NAME|FILE.yaml] [FLAGS]", ""]
    return "\n".join(["examples:", *examples, *usage, *lines])


def not_a_model(word: str) -> str:
    """Return the complaint about a first argument that is not the name of a model."""
    kinds = {script: kind for kind, script in SCRIPTS.items()}
    near = [kinds[word]] if word in kinds else get_close_matches(word, KINDS, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    choices = " or ".join(f"megapar pretrain {kind}" for kind in KINDS)
    return f"{word} is not the name of a model, which comes first.{hint} Write {choices}, then the flags."


def pretrain(kind: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Check the configuration, train, and exit: status 0 done, 2 refused, 1 anything else.

    Args:
        kind: ``moe`` or ``ernie``.
        argv: The flags; by default the command line of this process.
    """
    prepare_process()
    with packages_or_exit():
        config = parse_or_exit(kind, argv, outline=checked_outline)
        check_torch(os.environ)

        from megapar.trainer import main as train  # imports torch, so only after the configuration is accepted

    train(config)


def checked_outline(config: Config) -> str:
    """Return the outline. A run is first compared with this machine. Raises ConfigError."""
    from megapar.planning.devices import check_host  # the planner takes longer to import than a refusal may

    sys.stderr.write(check_host(config, os.environ))
    return outline(config)


def prepare_process() -> None:
    """Make this process end with its launcher, and on Ctrl-C until training starts, which saves and stops instead."""
    end_with_launcher()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
