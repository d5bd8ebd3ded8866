"""Kernels of attention of a run: the calls that it makes, and what ``--attention-backend`` selects for them.

Imports no torch: the planner names the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from megapar.arguments import Config
from megapar.core.context_parallel.halo import rows_exchanged
from megapar.core.device.attention import table
from megapar.core.device.kinds import DeviceKind
from megapar.model.sizes import ModelSizes
from megapar.training.building.partition import make_layout

ULYSSES = "ulysses_cp_algo"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as a flag's -> as torch writes it
# Kernel of whole samples -> operator of the table in ``core/device/ops.py``.
_OPERATORS = {table.FLASH: "attention_flash", table.FLASH3: "attention_flash", table.CUDNN: "attention_cudnn"}


class AttentionDevice(Protocol):
    """The part of a device that the choice depends on."""

    @property
    def capability(self) -> table.Capability | None:
        """Compute capability of an NVIDIA GPU, else None."""

    def attention_lacks(self, kernel: str) -> str:
        """Return the reason why this installation lacks a kernel, else ""."""


def skips_padding(config: Config) -> bool:
    """Return True if padding is removed before the model: by ERNIE, unless ranks share the positions of a sample.

    Padding of a decoder comes after the text of a causal sample. ERNIE 3.0 selects whole samples for its branches.
    """
    return not config.model.causal and not config.model.mixes_tasks and config.parallel.cp_degree == 1


def forms_of(config: Config) -> tuple[str, ...]:
    """Return the forms of attention that the layers of a run call."""
    windowed = _windowed(config.model)
    if windowed == len(config.model.windows):
        return (table.WINDOW,)
    return (*_without_window(config), *((table.WINDOW,) if windowed else ()))


def _without_window(config: Config) -> tuple[str, ...]:
    """Return the forms of the layers that see all keys."""
    parallel, degree = config.parallel, config.ampipe.ampipe_degree
    if parallel.cp_degree > 1 and parallel.context_parallel_algo != ULYSSES:
        return (table.BLOCKS,)
    if config.model.mixes_tasks:
        return (table.FULL, table.MASKED, table.CAUSAL)
    if not config.model.causal:
        return (table.DOCUMENTS, table.FULL) if skips_padding(config) else (table.MASKED, table.FULL)
    if config.data.reset_attention_mask:
        return (table.DOCUMENTS,)
    if degree == 1:
        return (table.CAUSAL,)
    return (table.LOWER_RIGHT,) if degree else (table.CAUSAL, table.LOWER_RIGHT)  # 0: the trainer chooses


def calls_of(config: Config, capability: table.Capability, dtype: str) -> tuple[table.AttentionCall, ...]:
    """Return the calls of attention of a run on a GPU. ``dtype``: Compute dtype, as torch writes it."""
    sizes, repeats, optimizer = config.model.attention, config.training.deterministic, config.optimizer
    statistic = optimizer.qk_clip_statistic if optimizer.qk_clip_threshold else table.LSE if sizes.sinks else ""
    dims = (sizes.key_dim, sizes.value_dim)
    return tuple(
        table.AttentionCall(form, *dims, dtype, capability, sizes.dropout > 0.0, repeats, statistic)
        for form in forms_of(config)
    )


def backend_lacks(config: Config, device: AttentionDevice, dtype: str) -> str:
    """Return the reason why the kernel of --attention-backend cannot run here, or runs in no layer; "" if it can."""
    backend = config.training.attention_backend
    if backend == table.AUTO:
        return ""
    if reason := device.attention_lacks(backend):
        return reason
    return table.lacks(backend, calls_of(config, device.capability or (0, 0), dtype))


def chosen_rows(config: Config, device: AttentionDevice, dtype: str) -> tuple[table.KernelRow, ...]:
    """Return the row of the table that each call of a run takes on a GPU, among kernels that are installed."""
    installed = tuple(
        row
        for row in table.ROWS
        if row.kernel not in (table.CUDNN, table.FLASH3) or not device.attention_lacks(row.kernel)
    )
    calls = calls_of(config, device.capability or (0, 0), dtype)
    return tuple(table.choose(config.training.attention_backend, call, installed) for call in calls)


def repeats_keys(config: Config, kind: DeviceKind, dtype: str) -> bool:
    """Return True if a kernel of attention gets keys and values repeated for each query head. dtype: as a flag's."""
    sizes = config.model.attention
    if kind.capability is None or sizes.queries_per_group == 1 or not config.model.use_flash_attn or dtype == "fp64":
        return False
    return any(table.repeats_heads(call) for call in calls_of(config, kind.capability, _DTYPES[dtype]))


def attention_operator(config: Config, device: AttentionDevice, dtype: str) -> str:
    """Return the operator of whole samples: ``attention``, which leaves the kernel to torch, or one with its kernel.

    torch's choice gives no statistics of rows, so that QK-clip and sinks name the same kernel.
    """
    if device.capability is None or not config.model.use_flash_attn or dtype == "float64":
        return "attention"
    chosen = zip(forms_of(config), chosen_rows(config, device, dtype), strict=True)
    row = next((row for form, row in chosen if form in (table.CAUSAL, table.FULL)), None)
    needs_rows = config.optimizer.qk_clip_threshold or config.model.attention.sinks
    left_to_torch = config.training.attention_backend == table.AUTO and not needs_rows
    if row is None or (row.standing == table.TODAY and left_to_torch):
        return "attention"
    return _OPERATORS.get(row.kernel, "attention")


def needs_flash3(config: Config, device: AttentionDevice, dtype: str) -> bool:
    """Return True if FlashAttention-3 must take the place of torch's FlashAttention before the model is built."""
    if device.capability is None or not config.model.use_flash_attn or dtype == "float64":
        return False
    return any(row.kernel == table.FLASH3 for row in chosen_rows(config, device, dtype))


def _windowed(sizes: ModelSizes) -> int:
    """Return how many blocks have a window that hides keys."""
    return sum(0 < window < sizes.seq_length for window in sizes.windows)


def attention_kernels(config: Config, kind: DeviceKind) -> str:
    """Return the windows and the kernels of a run on devices of this kind, for the plan and the log."""
    sizes, window, parallel = config.longest.model, max(config.model.windows), config.parallel
    said = f"a window of {window} keys in {_windowed(sizes)} of {len(sizes.windows)} layers; "
    if not _windowed(sizes):
        said = f"no position has more keys than the window of {window}; " if window else ""
    elif parallel.cp_degree > 1 and parallel.context_parallel_algo != ULYSSES:
        (rows, _), length = rows_exchanged(make_layout(config), window, sizes.seq_length), sizes.seq_length
        of = length - length // parallel.cp_degree
        said += f"there a rank of cp gets {'all' if rows == of else f'at most {rows:,} of'} {of:,} rows of others; "
    return said + _kernels(config, kind)


def _kernels(config: Config, kind: DeviceKind) -> str:
    dtype = kind.default_dtype if config.training.dtype == "auto" else config.training.dtype
    if not config.model.use_flash_attn:
        return "plain products (--no-use-flash-attn)"
    if dtype == "fp64":
        return "plain products (fp64)"
    if kind.capability is None:
        return {
            "cuda": "torch's choice for ROCm; plain products in ring attention",
            "npu": "npu_fusion_attention",
            "cpu": "torch's fused kernel for CPUs",
        }[kind.kernels]
    least, named = kind.device_class.least_document, ", ".join(_named(config, kind.capability, _DTYPES[dtype]))
    long = config.model.causal and 0 < least <= config.model.seq_length and table.DOCUMENTS in forms_of(config)
    return named + (f", each by a call if none is shorter than {least}" if long else "")


def _named(config: Config, capability: table.Capability, dtype: str) -> Iterator[str]:
    backend = config.training.attention_backend
    for call in calls_of(config, capability, dtype):
        row = table.choose(backend, call)
        standings = {table.TODAY: "today's choice", "": "not confirmed by a measurement"}
        why = standings.get(row.standing, f"confirmed {row.standing}")
        yield f"{call.form} by {row.kernel} ({why})"
