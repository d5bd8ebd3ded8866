"""Orthogonalization of matrices by Newton-Schulz iterations, and the size of the update made of them, for Muon.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

# The polynomials a x + b x^3 + c x^5 of an iteration's singular values; the last one is repeated.
COEFFICIENTS: Mapping[str, tuple[Coefficients, ...]] = MappingProxyType(
    {
        # Jordan et al. 2024
        "simple": ((3.4445, -4.7750, 2.0315),),
        # Jordan's speedruns from 2025 on: another polynomial in each of five iterations
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # Amsel et al. 2025, "The Polar Express" (arXiv 2505.16932), in the rounded form of NVIDIA's optimizers
        "polar_express": (
            (7.2086, -15.5131, 9.0178),
            (3.9623, -2.5813, 0.4542),
            (3.9466, -2.5765, 0.4544),
            (3.8991, -2.5671, 0.4566),
            (3.7186, -2.5308, 0.4653),
            (3.1390, -2.3073, 0.4733),
            (2.1715, -1.5246, 0.3885),
            (1.8648, -1.2224, 0.3577),
        ),
    }
)
# Factor of an orthogonalized matrix [R, C], by which updates of matrices of all shapes are alike.
SCALES: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "spectral": lambda rows, columns: max(rows, columns) ** 0.5,  # Liu et al. 2025
        "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,  # Bernstein 2025, "Deriving Muon"
        "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,  # Jordan et al. 2024
    }
)
_LEAST_NORM = 1e-7


def orthogonalize(x: Tensor, coefficients: Sequence[Coefficients], steps: int) -> Tensor:
    """Return matrices [n, R, C] with the singular vectors of those in x and singular values near 1.

    Zero stays zero. x is not changed.
    """
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=_norm_dtype(x.dtype))
    wide = wide / norm.clamp(min=_LEAST_NORM).to(x.dtype)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
