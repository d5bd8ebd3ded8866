"""Decision of ``--compile`` from the flags and the class of the device. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from megapar.config.config import Config

# auto stays off until steps on GPUs are shorter. On an H200 bf16 losses are unchanged, and steps take 0.99 to 1.01 of
# the time (benchmarks/throughput).
AUTO_COMPILES = False
TRITON = "triton"


class Compilation(NamedTuple):
    """The decision before the compiler is tried; ``reason`` explains that of ``auto``, "" if a flag decides."""

    on: bool
    reason: str

    def __str__(self) -> str:
        """Format it for the plan and the log."""
        return f"{'on' if self.on else 'off'} (--compile{f' auto: {self.reason}' if self.reason else ''})"


def compilation(config: Config, compiler: str) -> Compilation:
    """Return whether functions are compiled. ``compiler`` is that of the device's class (``kinds.yaml``)."""
    training = config.training
    if training.compile != "auto":
        return Compilation(training.compile == "on", "")
    for excluded, reason in (
        (training.deterministic, "--deterministic excludes kernels that are chosen by timing them"),
        (training.dtype == "fp64", "fp64 runs the reference forms"),
        (config.values().get("ernie_model") == "ernie3", "sizes of ERNIE 3.0's segments change from step to step"),
        (compiler != TRITON, "only for devices that Triton compiles for"),
        (not AUTO_COMPILES, "steps on an H200 were no shorter"),
    ):
        if excluded:
            return Compilation(False, reason)
    return Compilation(True, "Triton compiles for this device")
