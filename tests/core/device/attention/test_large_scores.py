"""Scores of 200 in fp32 and bf16 against fp64: softmaxes of almost one key, where a rounded score changes a weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapar.core.device.attention.sinks import SinkRows
from tests.core.device.attention.test_row_statistic import CPU, NAMES, NPU, REFERENCE, SLICE, called, heads
from tests.core.device.attention.test_sinks import formula, seen_keys

SINKS = (8.0, -8.0, 200.0, -200.0)
# Relative to the sum of what an element is added up from: a score of 200 is exact to 2^-16, bf16 rounds to 2^-9.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}


def inputs(dtype: torch.dtype, sinks: bool) -> list[Tensor]:
    q, k, v = (x.detach() for x in heads(torch.float64))
    drawn = [3 * q, 3 * k, v, *([torch.tensor(SINKS)] if sinks else [])]
    return [x.to(dtype).requires_grad_() for x in drawn]


def sums(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor, upstream: Tensor) -> list[Tensor]:
    """Return what the output and the gradients of q, k, v and the sinks are, with every term by its size."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    wide = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1).softmax(-1)
    weights, v, upstream = wide[..., :-1], v.abs(), upstream.abs()
    rows = (upstream * (weights @ v)).sum(-1, keepdim=True)
    into = weights * (upstream @ v.mT + rows) * q.shape[-1] ** -0.5
    return [weights @ v, into @ k.abs(), into.mT @ q.abs(), weights.mT @ upstream, wide[..., -1:] * rows]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [(REFERENCE, torch.float32), (REFERENCE, torch.bfloat16), (CPU, torch.float32), (CPU, torch.bfloat16),
     (NPU, torch.float32)],
)  # fmt: skip
def test_every_form_is_the_formula_in_fp64(name: str, device: str, dtype: torch.dtype, sinks: bool) -> None:
    own = inputs(dtype, sinks)
    exact = [x.detach().double().requires_grad_() for x in own]
    column = exact[3] if sinks else torch.full((len(SINKS),), -torch.inf, dtype=torch.float64)
    y = called(name, device, *own[:3], rows=SinkRows(own[3]) if sinks else None)
    part = SLICE if "slice" in name else slice(None)
    whole = formula(*exact[:3], column, seen_keys(name))
    upstream = torch.zeros_like(whole)
    upstream[:, :, part] = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(dtype).double()
    found = (y, *torch.autograd.grad(y, own, upstream[:, :, part].to(dtype)))
    want = (whole[:, :, part], *torch.autograd.grad(whole, exact, upstream))
    with torch.no_grad():
        largest = sums(*exact[:3], column, seen_keys(name), upstream)
        scores = exact[0] @ exact[1].repeat_interleave(2, 1).mT * exact[0].shape[-1] ** -0.5
        assert scores.max() > 200
        assert scores.min() < -200
        for a, b, size in zip(found, want, largest, strict=False):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCE[dtype] * float(size.max()))
