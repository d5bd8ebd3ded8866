"""Trial of the Triton kernels on a GPU, before a run uses them.

Tested in ``tests/core/device/test_triton_operators.py``.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from megapar.core.device.cross_entropy import cross_entropy_reference
from megapar.core.device.rotary import rotary_heads_reference
from megapar.core.device.swiglu import swiglu_reference
from megapar.core.device.triton_operators import (
    cross_entropy,
    rotary_heads,
    rotary_heads_backward,
    swiglu,
    swiglu_backward,
)

TOLERANCE = 2e-2  # of a bf16 example, relative to the norm


def triton_failure(device: torch.device) -> str:
    """Return the reason that ``device`` cannot use the kernels; "" if each computes its example right."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        wrong = [name for name, error in errors(device).items() if not error < TOLERANCE]
    except Exception as error:  # whatever a compiler or a driver raises
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return f"wrong results: {', '.join(wrong)}" if wrong else ""


@torch.no_grad()
def errors(device: torch.device) -> dict[str, float]:
    """Return operator -> relative error of its example."""
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 3, 2, 6, 64, generator=random).to(device, torch.bfloat16)
    angles = torch.randn(2, 3, 32, generator=random).to(device)
    cos, sin = angles.cos(), angles.sin()
    heads, wanted = rotary_heads(qkv, cos, sin), rotary_heads_reference(qkv.float(), cos, sin)
    # The backward rotates back: of the heads it makes qkv again.
    pairs = {"rotary_heads": list(zip(heads, wanted, strict=True))}
    pairs["rotary_heads_backward"] = [(rotary_heads_backward(*heads, cos, sin), qkv)]
    logits, labels = torch.randn(3, 5000, generator=random).to(device), torch.tensor([7, 0, 4999], device=device)
    forms = (cross_entropy, cross_entropy_reference)
    found, expected = (form(logits.clone(), labels, torch.bfloat16) for form in forms)
    pairs["cross_entropy"] = list(zip(found, expected, strict=True))
    gate_up = torch.randn(3, 2, 1500, generator=random).to(device, torch.bfloat16)
    weights, gradient = torch.rand(3, 1, generator=random).to(device), gate_up[:, 0]
    inputs = [x.float().requires_grad_() for x in (gate_up, weights)]
    with torch.enable_grad():
        y = swiglu_reference(*inputs)
        wanted_gradients = torch.autograd.grad(y, inputs, gradient.float())
    pairs["swiglu"] = [(swiglu(gate_up, weights), y)]
    d_gate_up, d_weights = swiglu_backward(gradient, gate_up, weights)
    assert d_weights is not None
    pairs["swiglu_backward"] = list(zip((d_gate_up, d_weights), wanted_gradients, strict=True))
    return {
        name: max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in both)
        for name, both in pairs.items()
    }
