"""Checks of Triton kernels by Triton's interpreter, on CPU tensors, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SECONDS = 240


def run_interpreted(file: str, name: str = "check") -> None:
    """Call a function of a test file; skip the test without Triton.

    Triton chooses between compiler and interpreter when its own library is imported, so a process has only one of them.
    """
    pytest.importorskip("triton")
    line = [sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[1])[sys.argv[2]]()", file, name]
    done = subprocess.run(
        line,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
