"""Peak memory of a contestant while it works, without its start."""

from __future__ import annotations

from pathlib import Path

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Peak of memory since this object was made: resident bytes on a CPU (Linux), allocated bytes on a GPU."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            (_PROCESS / "clear_refs").write_text("5")  # the kernel forgets the peak it has seen

    def read(self) -> float:
        """Return the bytes at the peak so far."""
        if self._device == "cuda":
            import torch

            return float(torch.cuda.max_memory_allocated())
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return float(line.split()[1]) * 1024
        raise RuntimeError("/proc/self/status has no VmHWM")
