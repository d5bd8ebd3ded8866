"""Ascend NPUs through torch_npu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from megapar.core.device.base import Accelerator


class NpuDevice(Accelerator):
    """An Ascend NPU; importing torch_npu registers the device type and the hccl backend."""

    type = "npu"
    backend = "cpu:gloo,npu:hccl"
    skips_updates = False
    repeatable: ClassVar[Mapping[str, str]] = {"HCCL_DETERMINISTIC": "true"}

    def __init__(self, local_rank: int = 0) -> None:
        import torch_npu  # noqa: F401  importing it is what registers the device

        super().__init__(local_rank)

    def prepare_process(self) -> None:
        """Tensors stay as torch lays them out: of the vendor's layouts every view and collective makes a copy."""
        super().prepare_process()
        self.module.config.allow_internal_format = False

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """npu_grouped_matmul takes rows of any width."""
        return super().grouped_lacks(dtype, ())

    def compiler_lacks(self) -> str:
        """Nothing that this version would use."""
        return "torch.compile makes code for CPUs and GPUs here"
