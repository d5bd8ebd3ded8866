"""Starts a module of megapar in a process of its own, as ``python -m`` does, but not from the working directory.

    python .../megapar/tools/launcher/own.py MODULE ARGUMENTS...

``python -m`` puts the working directory first on sys.path, in front of the standard library: whoever may write there
would have a yaml.py of his run by everybody who starts a job there. (``-P`` exists from Python 3.11 on.) Here sys.path
has what every script finds there, without a folder of its own in front, and the package is the one that this file
belongs to, wherever the launcher found it.
"""

from __future__ import annotations

import os
import sys


def line(module: str) -> tuple[str, ...]:
    """What follows ``python`` in a command that runs a module, in front of its arguments."""
    return os.path.abspath(__file__), module


def main() -> None:
    """Run the module that the command names."""
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):  # not so with PYTHONSAFEPATH
        del sys.path[0]
    import importlib  # with this folder gone from sys.path, which has names of the standard library's
    import runpy

    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, os.path.dirname(package))
    importlib.import_module("megapar")  # imports nothing else, and its modules are found by it
    del sys.path[0]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
