"""Ascend NPUs, by torch_npu."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch

from megapar.core.device.base import Accelerator
from megapar.core.device.communicators import SMALL_HCCL_MIB, is_light


class NpuDevice(Accelerator):
    """An Ascend NPU. Creating one imports torch_npu, which registers the device type and the hccl backend."""

    type = "npu"
    backend = "cpu:gloo,npu:hccl"
    queue_backend = "hccl"
    skips_updates = False
    repeatable: ClassVar[Mapping[str, str]] = {"HCCL_DETERMINISTIC": "true"}

    def __init__(self, local_rank: int = 0) -> None:
        import torch_npu  # noqa: F401  the import registers the device

        super().__init__(local_rank)

    def prepare_process(self) -> None:
        """Keep torch's memory layout of tensors: each view and collective would copy the vendor's internal formats."""
        super().prepare_process()
        self.module.config.allow_internal_format = False

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """Return a reason for unsupported dtypes only: npu_grouped_matmul accepts rows of any width."""
        return super().grouped_lacks(dtype, ())

    def group_options(self, names: Collection[str], timeout: timedelta, *, queue: bool) -> Any:
        """Request small buffers for queues and for axes with small messages, if this version of torch_npu allows it."""
        import torch_npu

        groups: Any = getattr(torch_npu._C._distributed_c10d, "ProcessGroupHCCL", None)
        if not (queue or is_light(names)) or not hasattr(getattr(groups, "Options", None), "hccl_config"):
            return None
        options = groups.Options()
        options._timeout = timeout
        options.hccl_config = {"hccl_buffer_size": SMALL_HCCL_MIB}
        return options

    def compiler_lacks(self) -> str:
        """Return a reason in every case: this version does not compile for NPUs."""
        return "torch.compile generates code only for CPUs and GPUs"
