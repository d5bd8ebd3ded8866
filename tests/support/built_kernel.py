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
        spilled: Bytes of a thread's local memory, which registers were spilled to; on an AMD GPU with the number of
            spilled scalar registers.
        shared: Bytes of shared memory of a block.
    """

    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel with the types that it is compiled for.

    Attributes:
        function: The function decorated by ``triton.jit``.
        signature: Argument -> type in Triton's notation, without the constants.
        constants: Compile-time constants; None for an argument that is not given.
        warps: Warps of a block. A warp has 32 threads on an NVIDIA GPU, 64 on an AMD Instinct.
        fuses: Products and sums may be one operation, which rounds once.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, float | None]
    warps: int
    fuses: bool = True

    def ptx(self, capability: int) -> str:
        """Compile for ``capability`` and return the instructions, in NVIDIA's notation."""
        return str(self._compiled("cuda", capability, 32).asm["ptx"])

    def resources(self, capability: int) -> Resources:
        """Compile for ``capability`` (90 for Hopper) and return what NVIDIA's assembler says of the result."""
        import triton

        kernel = self._compiled("cuda", capability, 32)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
            said = subprocess.run(
                [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
            )
        found = {name: int(value) for name, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", said.stdout)}
        return Resources(found["REG"], found["LOCAL"] + found["STACK"], kernel.metadata.shared)

    def resources_on_amd(self, architecture: str) -> Resources:
        """Compile for an AMD Instinct (gfx942: MI300X) and return what the assembler's notes say of the result."""
        kernel = self._compiled("hip", architecture, 64)
        notes = re.findall(r"\.(\w+):\s+(\d+)", kernel.asm["amdgcn"])
        found = {name: int(value) for name, value in notes}
        spilled = found["private_segment_fixed_size"] + found["sgpr_spill_count"]
        return Resources(found["vgpr_count"], spilled, kernel.metadata.shared)

    def _compiled(self, backend: str, architecture: int | str, warp: int) -> Any:
        import triton
        from triton.backends.compiler import GPUTarget

        signature = {**self.signature, **dict.fromkeys(self.constants, "constexpr")}
        source = triton.compiler.ASTSource(self.function, signature, constexprs=dict(self.constants))
        target = GPUTarget(backend, architecture, warp)
        return triton.compile(source, target=target, options={"num_warps": self.warps, "enable_fp_fusion": self.fuses})
