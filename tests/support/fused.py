"""torch's fused collective products on a CPU: by the plain forms that torch itself falls back to in its tests.

The operators exist for CUDA and as shapes only; what they are called with here goes through their real schemas.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.distributed import _symmetric_memory


@cache
def on_a_cpu() -> torch.library.Library:
    """Register them, once per process."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), "CPU")
    return library
