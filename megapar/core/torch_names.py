"""Functions that torch calls otherwise from one supported version to the next (2.11 to 2.13)."""

from __future__ import annotations

import torch
import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def abort_process_groups() -> None:
    """End all process groups without waiting for what their peers may never send."""
    dist.distributed_c10d._abort_process_group()


def flight_record() -> bytes:
    """What torch's flight recorder has of this process' collectives, JSON; empty where it recorded none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    record: bytes = dump() if dump is not None else b""
    return record if b'"record_id"' in record else b""
