"""Kernels of the cross-entropy against the formula in fp64, run by Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megapar.core.device.triton_operators import KERNELS
from tests.support.interpreted import run_interpreted

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # the interpreter rounds towards zero


@given(
    rows=st.integers(0, 5),
    width=st.one_of(st.integers(1, 40), st.integers(4090, 4100)),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    size=st.sampled_from((4, 100)),  # with 100 exponentials overflow and vanish, and a logit is rounded to 2^-16
    seed=st.integers(0, 99),
)
@example(rows=3, width=4100, dtype=torch.float32, size=100, seed=0)  # the last columns are far below the others
@settings(max_examples=9, deadline=None)
def check(rows, width, dtype, size, seed):
    random = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, width + 3, generator=random).mul(size).to(dtype)
    logits = whole[:, :width]  # rows need not lie next to each other
    labels = torch.randint(0, width, (rows,), generator=random)
    exact = logits.double().log_softmax(-1)
    lse, log_p = KERNELS["log_probabilities"](logits, labels)
    torch.testing.assert_close(lse.double(), logits.double().logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_p.double(), exact.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    expected = exact.exp().scatter_add_(1, labels[:, None], -torch.ones(rows, 1, dtype=torch.float64))
    for wanted, tolerance in TOLERANCE.items():
        got = KERNELS["gradient_of_logits"](logits, labels, lse, wanted)
        assert got.dtype == wanted
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-6 * size)


def test_statistics_and_gradients_are_those_of_the_formula():
    run_interpreted(__file__)
