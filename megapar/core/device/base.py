"""What differs between devices, and nothing else; everything torch knows by itself is asked of torch."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch
from torch import Tensor

# torch.Stream where the device has streams, NoStream elsewhere.
Stream = Any


class NoStream:
    """The stream of a device that has none: what is enqueued has been done."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> None:
        """What has been enqueued has happened."""

    def wait_event(self, event: object) -> None:
        """It has happened."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class Device:
    """The CPU; accelerators override what differs.

    torch_device: where tensors live. backend: what ``init_process_group`` takes.
    """

    type = "cpu"
    backend = "gloo"

    def __init__(self, local_rank: int = 0) -> None:
        self.local_rank = local_rank
        self.torch_device = torch.device("cpu")

    @property
    def name(self) -> str:
        """For people: the kind of device and how many threads or which model."""
        return f"cpu ({torch.get_num_threads()} threads)"

    @property
    def device_id(self) -> torch.device | None:
        """What ``init_process_group(device_id=...)`` takes for eager communicators; None on CPU."""
        return None

    @property
    def default_dtype(self) -> torch.dtype:
        """The compute dtype where none is asked for."""
        return torch.float32

    def synchronize(self) -> None:
        """Wait until everything enqueued is done; nothing to do on a CPU."""

    def new_stream(self) -> Stream:
        """A queue of work beside the current one."""
        return NoStream()

    def current_stream(self) -> Stream:
        """The queue that operations go to now."""
        return NoStream()

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from and to by itself, filled with zeros."""
        return torch.zeros(numel, dtype=dtype)

    def peak_memory_bytes(self) -> int:
        """Highest number of bytes held so far: resident memory of the process on CPU, allocated bytes elsewhere."""
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Accelerator(Device):
    """What CUDA and Ascend devices share: torch's device module of the type answers."""

    def __init__(self, local_rank: int = 0) -> None:
        super().__init__(local_rank)
        self.module = torch.get_device_module(self.type)
        self.torch_device = torch.device(self.type, local_rank)
        self.module.set_device(local_rank)

    @property
    def name(self) -> str:
        """The model of the device, as its driver calls it."""
        return str(self.module.get_device_name(self.local_rank))

    @property
    def device_id(self) -> torch.device | None:
        """This rank's device."""
        return self.torch_device

    @property
    def default_dtype(self) -> torch.dtype:
        """bf16 on an accelerator."""
        return torch.bfloat16

    def synchronize(self) -> None:
        """Wait until everything enqueued on the device is done."""
        self.module.synchronize()

    def new_stream(self) -> Stream:
        """A stream of this rank's device."""
        stream: Stream = torch.Stream(self.torch_device)
        return stream

    def current_stream(self) -> Stream:
        """The current stream of this rank's device."""
        stream: Stream = torch.accelerator.current_stream(self.torch_device)
        return stream

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def peak_memory_bytes(self) -> int:
        """Highest number of bytes allocated on the device so far."""
        return int(self.module.max_memory_allocated())
