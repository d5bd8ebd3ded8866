"""The kernel that adds gradients to sums against torch's operators, run by Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.device.triton_operators import KERNELS
from tests.support.interpreted import run_interpreted


@given(
    pieces=st.integers(0, 3),
    length=st.one_of(st.integers(0, 40), st.integers(4094, 4099)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    begins=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def check(pieces, length, dtype, begins, seed):
    """To the last bit, where the pieces lie apart, and nothing beside them."""
    random = torch.Generator().manual_seed(seed)
    row, gradient = torch.randn(pieces, length + 5, generator=random), torch.randn(pieces, length, generator=random)
    gradient = gradient.to(dtype)
    wanted = row.clone()
    target = wanted[:, 2 : 2 + length]
    if begins:
        target.copy_(gradient)
    else:
        target.add_(gradient)
    KERNELS["add_gradient"](row[:, 2 : 2 + length], gradient, begins)
    assert torch.equal(row, wanted)


def test_gradients_are_added_as_by_torch():
    run_interpreted(__file__)
