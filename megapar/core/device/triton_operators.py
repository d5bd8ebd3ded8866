"""Operators that Triton kernels compute, registered with torch, so that a trace and a compiler see one operator each.

torch's builds for CUDA include Triton. GPUs use the kernels after each has computed an example (``triton_trial.py``);
otherwise they use the forms without Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.device.attention.table import LARGEST_GROUP

_USED: set[torch.device] = set()  # decided once per process
_LIBRARY = torch.library.Library("megapar", "DEF")
_LIBRARY.define("rotary_heads(Tensor qkv, Tensor cos, Tensor sin) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("rotary_heads_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor")
_LIBRARY.define("log_probabilities(Tensor logits, Tensor labels) -> (Tensor, Tensor)")
_LIBRARY.define("gradient_of_logits(Tensor logits, Tensor labels, Tensor lse, ScalarType dtype) -> Tensor")
_LIBRARY.define("swiglu(Tensor rows, Tensor? weights) -> Tensor")
_LIBRARY.define("swiglu_backward(Tensor gradient, Tensor rows, Tensor? weights) -> (Tensor, Tensor)")


def rotary_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [B, S, G, Q + 2, D] into q [B, S, G Q, D], k and v [B, S, G, D], and rotate q and k. No autograd.

    cos and sin are [B, S, D / 2] in fp32.
    """
    q, k, v = torch.ops.megapar.rotary_heads(qkv.contiguous(), *_by_sample(cos, sin))
    return q, k, v


def rotary_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of qkv for the gradients of ``rotary_heads``."""
    heads = (x.contiguous() for x in (dq, dk, dv))
    dqkv: Tensor = torch.ops.megapar.rotary_heads_backward(*heads, *_by_sample(cos, sin))
    return dqkv


def cross_entropy(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of labels [N] and the gradient of the sum of cross-entropies, [N, V] in ``dtype``.

    Args:
        logits: [N, V].
        labels: [N] int64.
        dtype: Dtype of the gradient.
    """
    lse, log_p = torch.ops.megapar.log_probabilities(logits, labels)
    return log_p, torch.ops.megapar.gradient_of_logits(logits, labels, lse, dtype)


def swiglu(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    """Return silu(gate) * up of gate_up [.., 2, F], times weights [.., 1] if given: [.., F]. No autograd."""
    y: Tensor = torch.ops.megapar.swiglu(_rows(gate_up, 2), None if weights is None else weights.flatten())
    return y.view(*gate_up.shape[:-2], -1)


def swiglu_backward(gradient: Tensor, gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gate_up and of the weights for the gradient of ``swiglu``."""
    flat = None if weights is None else weights.flatten()
    d_rows, d_weights = torch.ops.megapar.swiglu_backward(_rows(gradient, 1), _rows(gate_up, 2), flat)
    return d_rows.view(gate_up.shape), None if weights is None else d_weights.view(weights.shape)


def use(device: torch.device) -> None:
    """Let the GPU ``device`` use the kernels from now on. All ranks decide alike: results differ by rounding."""
    _USED.add(device)


def usable(device: torch.device) -> bool:
    """Return True if ``device`` uses the kernels (``use``)."""
    return device in _USED


def takes_heads(qkv: Tensor) -> bool:
    """Return True if the kernels take qkv [.., Q + 2, D], whose heads of a group must fit one block."""
    return usable(qkv.device) and qkv.shape[-2] * qkv.shape[-1] <= LARGEST_GROUP


def _rows(x: Tensor, dims: int) -> Tensor:
    """Return x as contiguous rows, [R, ..], of its last ``dims`` dims."""
    return x.contiguous().view(x.shape[:-dims].numel(), x.shape[-dims:].numel())


def _by_sample(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return angles whose positions are contiguous. Samples at the same positions may share them in memory."""
    if cos.stride() == sin.stride() and cos.stride()[1:] == (cos.shape[2], 1):
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _rotary_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from megapar.core.device.triton_kernels.rotary_heads import split_rotated

    heads = split_rotated(qkv, cos, sin)
    return heads.q, heads.k, heads.v


def _rotary_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from megapar.core.device.triton_kernels.rotary_heads import Heads, merge_rotated

    return merge_rotated(Heads(dq, dk, dv), cos, sin)


def _log_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from megapar.core.device.triton_kernels.cross_entropy import log_probabilities

    return log_probabilities(logits, labels)


def _gradient_of_logits(logits: Tensor, labels: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    from megapar.core.device.triton_kernels.cross_entropy import gradient_of

    return gradient_of(logits, labels, lse, dtype)


def _swiglu(rows: Tensor, weights: Tensor | None) -> Tensor:
    from megapar.core.device.triton_kernels import swiglu as kernels

    return kernels.swiglu(rows, weights)


def _swiglu_backward(gradient: Tensor, rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    from megapar.core.device.triton_kernels import swiglu as kernels

    return kernels.swiglu_backward(gradient, rows, weights)


def _fake_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, S, G, together, D = qkv.shape
    return qkv.new_empty(B, S, G * (together - 2), D), qkv.new_empty(B, S, G, D), qkv.new_empty(B, S, G, D)


def _fake_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, S, G, D = dk.shape
    return dq.new_empty(B, S, G, dq.shape[2] // G + 2, D)


def _fake_log_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


def _fake_gradient(logits: Tensor, labels: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.new_empty(logits.shape, dtype=dtype)


def _fake_swiglu(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


def _fake_swiglu_backward(gradient: Tensor, rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    d_weights = rows.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    return rows.new_empty(rows.shape), d_weights


for _name, _kernel, _fake in (
    ("rotary_heads", _rotary_heads, _fake_heads),
    ("rotary_heads_backward", _rotary_heads_backward, _fake_heads_backward),
    ("log_probabilities", _log_probabilities, _fake_log_probabilities),
    ("gradient_of_logits", _gradient_of_logits, _fake_gradient),
    ("swiglu", _swiglu, _fake_swiglu),
    ("swiglu_backward", _swiglu_backward, _fake_swiglu_backward),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"megapar::{_name}", _fake, lib=_LIBRARY)
