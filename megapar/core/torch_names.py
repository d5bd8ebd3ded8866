"""Functions whose names or arguments differ between the supported versions of torch (2.11 to 2.13)."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention
from torch import Tensor

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def abort_process_groups() -> None:
    """Abort all process groups without waiting for messages that their peers may never send."""
    dist.distributed_c10d._abort_process_group()


def flight_record() -> bytes:
    """Return a line of JSON of each flight recorder of torch with collectives of this process, NCCL's first.

    Builds with CUDA have a separate recorder for NCCL; the other one has gloo's collectives.
    """
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dumps = (getattr(torch._C._distributed_c10d, name, None) for name in names)
    records: list[bytes] = [dump() for dump in dumps if dump is not None]
    return b"\n".join(dict.fromkeys(record for record in records if b'"record_id"' in record))


def hooks_of_saved_tensors() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the functions of the innermost ``saved_tensors_hooks``; outside of any, two that change nothing."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = top and top(False)
    return hooks or (_unchanged, _unchanged)


def _unchanged(kept: Any) -> Any:
    return kept


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, *place: Any, **more: Any) -> Any:
    """Call ``torch.nn.attention.varlen.varlen_attn`` for any number of key-value heads that divides that of queries.

    Newer versions require ``enable_gqa`` if the numbers differ. 2.11 has no such argument and calls the same kernel.
    """
    from torch.nn.attention import varlen

    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        more["enable_gqa"] = key.shape[1] != query.shape[1]
    return varlen.varlen_attn(query, key, value, *place, **more)


def flash3_lacks() -> str:
    """Return the reason why torch cannot use FlashAttention-3 here, or "" if it can.

    The kernels are a package of its authors, built from the folder ``hopper`` of github.com/Dao-AILab/flash-attention.
    """
    if getattr(torch.nn.attention, "activate_flash_attention_impl", None) is None:
        return f"torch {torch.__version__} cannot use FlashAttention-3"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "the package of FlashAttention-3 (flash_attn_interface) is not installed"
    return ""


def activate_flash3() -> None:
    """Put FlashAttention-3 in the place of torch's FlashAttention. Raises RuntimeError if ``flash3_lacks``."""
    if reason := flash3_lacks():
        raise RuntimeError(reason)
    torch.nn.attention.activate_flash_attention_impl("FA3")
