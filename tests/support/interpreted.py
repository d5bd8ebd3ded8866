"""Checks of Triton kernels by Triton's interpreter, on CPU tensors, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

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


def cast_as_torch() -> None:
    """Replace the interpreter's cast to e4m3 by torch's: a mantissa that carries into the exponent is lost in it."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv:
            return convert(data, source, target, rounding)
        cast = torch.from_numpy(np.ascontiguousarray(data)).float().to(torch.float8_e4m3fn)
        return cast.view(torch.uint8).numpy()

    interpreter._convert_float = converted
