"""Fake GPU for fake tensors, and replacements for the parts of torch that depend on a build with CUDA.

If a CUDA build would choose a kernel (attention) or has one that other builds lack (fused norm), this module gives the
answer of a CUDA build, so that a trace contains the operators that a GPU would run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import bias, varlen

from megapar.core.device import ops, triton_operators
from megapar.core.device.accelerators import Accelerator, CudaDevice
from megapar.core.device.attention import table
from megapar.core.device.attention import whole as attention_forms
from megapar.core.device.base import Device
from megapar.core.device.kinds import device_class
from megapar.core.sharding import bucket
from megapar.tools.tracing.fake import replaced

_FSDP = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)
_HOPPER = (9, 0)  # compute capability of the device that ``FakeGpu`` names


class FakeGpu(CudaDevice):
    """A GPU with an asynchronous host and a single stream. Everything that needs no driver is inherited.

    Attributes:
        torch_device: Device of the fake tensors: "cuda" if its guard is replaced; "meta", which every build of torch
            has; "cpu" for FSDP2, which treats parameters on "meta" as not yet initialized.
        locked: Page-locked storages by address. A weak reference keeps its address from being reused.
    """

    def __init__(self, torch_device: torch.device) -> None:
        Device.__init__(self, 0)
        self.torch_device = torch_device
        self.locked: dict[int, StorageWeakRef] = {}
        if torch_device.type == "cpu":
            self.type = "cpu"  # device type of meshes

    @property
    def name(self) -> str:
        """Name of a device whose peak throughput is known."""
        return "NVIDIA H200"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the same device."""
        return _HOPPER

    def attention_lacks(self, kernel: str) -> str:
        """Return "": all kernels are installed."""
        return ""

    def fused_lacks(self) -> str:
        """Return "": the GPUs of the node read each other."""
        return ""

    def activate_flash3(self) -> None:
        """Do nothing: the operators keep their names."""

    def pin(self, x: Tensor) -> Tensor:
        """Record the tensor only, because not every build of torch can lock pages."""
        self.locked[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
        return x

    # A single stream, whose work has completed, without an allocator: as on a CPU.
    synchronize, adopt, after = Device.synchronize, Device.adopt, Device.after
    new_stream, current_stream = Device.new_stream, Device.current_stream
    event, timed_event = Device.event, Device.timed_event
    memory_pressure = Device.memory_pressure
    # Page-locked memory has torch's mark, but is not registered with a driver.
    pinned_zeros = Accelerator.pinned_zeros

    def peak_memory_bytes(self) -> int:
        """Return 0: no memory is allocated."""
        return 0


@contextmanager
def as_on_a_gpu(device: FakeGpu) -> Iterator[None]:
    """Run steps on ``device`` with the GPU implementations of the operator table and the choices of a CUDA build.

    torch would query a driver for these choices, so its functions are replaced. The table is replaced if the fake
    tensors are on a device type other than "cuda".
    """
    kind = device.torch_device.type
    with ExitStack() as stack:
        stack.enter_context(replaced(F, "scaled_dot_product_attention", attention))
        stack.enter_context(replaced(bias, "causal_lower_right", _LowerRight))
        stack.enter_context(replaced(attention_forms, "capability_of", lambda like: _HOPPER))
        stack.enter_context(replaced(varlen, "_should_use_cudnn", lambda device: False))
        stack.enter_context(replaced(triton_operators, "usable", lambda device: True))
        stack.enter_context(replaced(torch.cuda, "default_generators", (torch.default_generator,)))
        for module in _FSDP:
            stack.enter_context(replaced(module, "_get_device_handle", lambda kind: _Handle))
        stack.enter_context(replaced(_fsdp_param_group, "torch", _TorchOfGroups()))
        if kind == "meta":
            stack.enter_context(_messages_of(kind))
        if kind != "cuda":
            stack.enter_context(_fused_norms(kind))
            stack.enter_context(replaced(ops, "OPS", _forms(kind)))
            stack.enter_context(replaced(bucket, "device_class", lambda kind: device_class("cuda")))
        yield


@contextmanager
def _messages_of(kind: str) -> Iterator[None]:
    """Make torch's fake process groups also accept tensors of this device type."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers them

    capability = dist.Backend.backend_capability
    with replaced(dist.Backend, "backend_capability", {**capability, "fake": [*capability["fake"], kind]}):
        yield


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | _LowerRight | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that torch chooses on the device.

    For the arguments see ``torch.nn.functional.scaled_dot_product_attention``.
    """
    form = table.CAUSAL if is_causal else table.FULL if attn_mask is None else table.MASKED
    if isinstance(attn_mask, _LowerRight):  # the alignment of the kernel
        form, attn_mask, is_causal = table.LOWER_RIGHT, None, True
    kernel = _torchs_choice(attention_forms.call_of(form, query, value, dropout_p), grouped=enable_gqa)
    out: Tensor
    if kernel == table.FLASH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    inputs = query, key, value, attn_mask
    if kernel == table.MATH:
        plain = torch.ops.aten._scaled_dot_product_attention_math
        out = plain(*inputs, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        return out
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    if kernel == table.CUDNN:
        fused = torch.ops.aten._scaled_dot_product_cudnn_attention
    out = fused(*inputs, query.requires_grad, dropout_p, is_causal, scale=scale)[0]
    return out


def _torchs_choice(call: table.AttentionCall, *, grouped: bool) -> str:
    """Return the kernel that torch 2.11 runs, by the order and the conditions of its sdp_utils.cpp.

    Args:
        grouped: Keys have fewer heads than queries, which the memory-efficient kernel does not take.
    """
    prefers_cudnn = call.capability[0] in (9, 10) and torch.backends.cuda.cudnn_sdp_enabled()
    if (
        prefers_cudnn
        and call.form != table.LOWER_RIGHT
        and table.takes(table.CUDNN, call._replace(form=table.FULL, dropout=False))
    ):
        return table.CUDNN
    if table.takes(table.FLASH, call):
        return table.FLASH
    return table.EFFICIENT if table.takes(table.EFFICIENT, call) and not grouped else table.MATH


class _LowerRight(NamedTuple):
    """Alignment of a causal mask. torch's class is a tensor subclass, which fake tensors do not support."""

    queries: int
    keys: int


class _Handle:
    """Device module for FSDP2: torch's module for devices without streams."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    @staticmethod
    def current_device() -> int:
        """Return the first device."""
        return 0


class _TorchOfGroups:
    """Replacement for ``torch`` in FSDP2's parameter groups."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **options: Any) -> Tensor:
        """Ignore the device of empty tensors: groups are created outside fake mode, without a device."""
        return torch.empty(*size) if size == (0,) else torch.empty(*size, **options)


def _forms(kind: str) -> MappingProxyType[str, Any]:
    """Return the operator table with GPU implementations for another device type."""
    table = {name: {**forms, kind: forms.get("cuda", forms["reference"])} for name, forms in ops.OPS.items()}
    return MappingProxyType(table)


@contextmanager
def _fused_norms(kind: str) -> Iterator[None]:
    """Make the fused norm one operator with one backward, as on a GPU, instead of decomposing it."""
    key = {"cpu": "CPU", "meta": "Meta"}[kind]
    library: Any = torch.library.Library("aten", "IMPL", key)
    forms: dict[str, Callable[..., Any]] = {"_fused_rms_norm": _norm, "_fused_rms_norm_backward": _norm_backward}
    try:
        for name, form in forms.items():
            library.m.impl(name, key, form, False)  # ``impl`` itself requires a decomposition
        yield
    finally:
        library._destroy()


def _norm(x: Tensor, shape: Any, weight: Tensor | None, epsilon: float | None) -> tuple[Tensor, Tensor]:
    """Return (y like x, 1 / root of the mean of squares [.., 1] in fp32)."""
    return torch.empty_like(x), x.new_empty(
        (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)), dtype=torch.float32
    )


def _norm_backward(
    grad: Tensor, x: Tensor, shape: Any, scale: Tensor, weight: Tensor | None, mask: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and the weight."""
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
