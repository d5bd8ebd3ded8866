"""An old Python and a Python without the packages: one sentence, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megapar.tools.packages import packages_or_exit

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command", [["pretrain_moe.py", "--config", "tiny"], ["-m", "megapar", "plan", "--config", "tiny"]]
)
def test_a_missing_package_is_one_sentence(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-S", *command], capture_output=True, text=True, cwd=ROOT)  # -S: no packages
    assert done.returncode == 1
    assert done.stderr.startswith(f"megapar: {sys.executable} has no package yaml: ")
    assert done.stderr.count("\n") == 1


def test_other_modules_are_errors_of_the_code() -> None:
    with pytest.raises(ModuleNotFoundError, match="megapar_none"), packages_or_exit():
        __import__("megapar_none")


def test_an_old_python_is_named_before_a_file_that_it_cannot_read() -> None:
    code = "import sys; sys.version_info = (3, 9); import megapar"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.startswith("megapar needs Python 3.10 or later, and ")
    assert done.stderr.count("\n") == 1
