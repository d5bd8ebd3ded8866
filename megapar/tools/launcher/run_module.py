"""A safe ``python -m`` for modules of megapar: it does not import from the working directory.

    python .../megapar/tools/launcher/run_module.py MODULE ARGUMENTS...

``python -m`` puts the working directory first on sys.path, before the standard library. Any user with write access to
that directory could place a yaml.py there, which every job started from it would run. (``-P`` needs Python 3.11.) This
script runs the module with the sys.path of an ordinary script, minus the script's folder, and from the package that
this file belongs to, regardless of how the launcher found it.
"""

from __future__ import annotations

import os
import sys


def module_command(module: str) -> tuple[str, ...]:
    """Return the arguments of ``python`` that run a module. Append the module's own arguments."""
    return os.path.abspath(__file__), module


def main() -> None:
    """Run the module that the command line names."""
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):  # false with PYTHONSAFEPATH
        del sys.path[0]
    import importlib  # imported after the removal: this folder has modules with names of the standard library
    import runpy

    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, os.path.dirname(package))
    importlib.import_module("megapar")  # imports no submodules; they are found through the package from now on
    del sys.path[0]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
