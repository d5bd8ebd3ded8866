"""Cross-entropy and its gradient: the GPU's form against its reference, and the reference against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.layer_ops import cross_entropy_fused, cross_entropy_reference
from megapar.core.device.ops import OPS, op

LABELS = torch.tensor([0, 12, 5, 5, 3, 7])


def drawn(dtype: torch.dtype, scale: float = 5.0) -> Tensor:
    return scale * torch.randn(6, 13, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_the_reference_is_torchs() -> None:
    logits = drawn(torch.float64).requires_grad_()
    expected = F.cross_entropy(logits, LABELS, reduction="none")
    log_probs, gradient = op("cross_entropy", logits)(logits.detach().clone(), LABELS, torch.float64)
    torch.testing.assert_close(-log_probs, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0])


@pytest.mark.parametrize("scale", [0.1, 5.0, 1000.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-3)]
)
def test_the_form_of_a_gpu_is_its_reference(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    assert OPS["cross_entropy"]["cuda"] is cross_entropy_fused
    logits = drawn(torch.promote_types(dtype, torch.float32), scale)
    log_probs, gradient = cross_entropy_fused(logits.clone(), LABELS, dtype)
    expected, exact = cross_entropy_reference(logits.double(), LABELS, torch.float64)
    assert (log_probs.dtype, gradient.dtype) == (logits.dtype, dtype)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact, rtol=tolerance, atol=tolerance)


def test_the_gradient_of_a_certain_label_keeps_its_digits() -> None:
    """In bf16, a probability of 0.999 is 1; 0.999 - 1 is not 0."""
    logits = torch.tensor([[7.0, 0.0]])
    gradient = cross_entropy_fused(logits, torch.tensor([0]), torch.bfloat16)[1]
    assert gradient[0].tolist() == pytest.approx([-9.11e-4, 9.11e-4], rel=5e-3)
