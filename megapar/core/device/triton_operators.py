"""Operators that Triton kernels compute, registered with torch, so that a trace and a compiler see one operator each.

torch's builds for CUDA include Triton. A GPU's kernels are used after each has computed a small example right there;
otherwise the device's forms without Triton are, with one warning.

Tested in ``tests/core/device/test_triton_operators.py``.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

TOLERANCE = 2e-2  # of a bf16 example, relative to the norm

_LIBRARY = torch.library.Library("megapar", "DEF")
_LIBRARY.define("rotary_heads(Tensor qkv, Tensor cos, Tensor sin) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("rotary_heads_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor")
_LIBRARY.define("log_probabilities(Tensor logits, Tensor labels) -> (Tensor, Tensor)")
_LIBRARY.define("gradient_of_logits(Tensor logits, Tensor labels, Tensor lse, ScalarType dtype) -> Tensor")


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


def usable(device: torch.device) -> bool:
    """Return True if ``device`` is a GPU, Triton is installed, and every kernel has passed its trial there."""
    return device.type == "cuda" and find_spec("triton") is not None and passed(device)


@cache
def passed(device: torch.device) -> bool:
    """Return True if every kernel computes its example right on ``device``; otherwise warn."""
    try:
        wrong = [name for name, error in _errors(device).items() if not error < TOLERANCE]
    except Exception as error:  # whatever a compiler or a driver raises
        wrong = [f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"]
    if wrong:
        message = f"Triton kernels are not used on {device} ({', '.join(wrong)}); the numbers are the same without them"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return not wrong


def _errors(device: torch.device) -> dict[str, float]:
    """Return operator -> relative error of its example."""
    from megapar.core.device.cross_entropy import cross_entropy_reference
    from megapar.core.device.rotary import rotary_heads_reference

    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 3, 2, 6, 64, generator=random).to(device, torch.bfloat16)
    angles = torch.randn(2, 3, 32, generator=random).to(device)
    logits, labels = torch.randn(3, 5000, generator=random).to(device), torch.tensor([7, 0, 4999], device=device)
    exact = qkv.float().requires_grad_()
    wanted = rotary_heads_reference(exact, angles.cos(), angles.sin())
    heads = rotary_heads(qkv, angles.cos(), angles.sin())
    (gradient,) = torch.autograd.grad(wanted, exact, [x.float() for x in heads])
    turned = rotary_heads_backward(*heads, angles.cos(), angles.sin())
    pairs = {"rotary_heads": list(zip(heads, wanted, strict=True)), "rotary_heads_backward": [(turned, gradient)]}
    found, expected = (
        form(logits.clone(), labels, torch.bfloat16) for form in (cross_entropy, cross_entropy_reference)
    )
    pairs["cross_entropy"] = list(zip(found, expected, strict=True))
    return {
        name: max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in both)
        for name, both in pairs.items()
    }


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


for _name, _kernel, _fake in (
    ("rotary_heads", _rotary_heads, _fake_heads),
    ("rotary_heads_backward", _rotary_heads_backward, _fake_heads_backward),
    ("log_probabilities", _log_probabilities, _fake_log_probabilities),
    ("gradient_of_logits", _gradient_of_logits, _fake_gradient),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"megapar::{_name}", _fake, lib=_LIBRARY)
