"""A GPU that is not there, for fake tensors: the operators' forms for GPUs run, and no stream or driver is asked.

With it real training code can be followed on any machine, up to the kernels.
"""

from __future__ import annotations

import torch

from megapar.core.device.base import Device


class PretendedGpu(Device):
    """Only under FakeTensorMode."""

    type = "cuda"
    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", 0)

    @property
    def name(self) -> str:
        """For people."""
        return "a GPU that is not there"

    @property
    def default_dtype(self) -> torch.dtype:
        """bf16, as on a real one."""
        return torch.bfloat16
