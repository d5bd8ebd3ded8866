"""Compilation of Triton kernels for a GPU that this machine need not have, and the resources that they take there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Resources(NamedTuple):
    """Resources of a compiled kernel.

    Attributes:
        registers: Registers of a thread.
        spilled: Bytes of a thread's local memory, which registers were spilled to.
        shared: Bytes of shared memory of a block.
    """

    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel with the types that it is compiled for.

    Attributes:
        name: Name for messages.
        function: The function decorated by ``triton.jit``.
        signature: Argument -> type in Triton's notation, without the constants.
        constants: Compile-time constants; None for an argument that is not given.
        warps: Warps of a block.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, int | None]
    warps: int

    def resources(self, capability: int) -> Resources:
        """Compile for ``capability`` (90 for Hopper) and return what NVIDIA's assembler says of the result."""
        import triton
        from triton.backends.compiler import GPUTarget

        signature = {**self.signature, **dict.fromkeys(self.constants, "constexpr")}
        source = triton.compiler.ASTSource(self.function, signature, constexprs=dict(self.constants))
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": self.warps})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
            said = subprocess.run(
                [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
            )
        found = {name: int(value) for name, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", said.stdout)}
        return Resources(found["REG"], found["LOCAL"] + found["STACK"], kernel.metadata.shared)
