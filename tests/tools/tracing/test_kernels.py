"""How many kernels operators launch: a table, and a door for what is not torch's."""

from __future__ import annotations

import pytest
import torch

from scripts.tracing import kernels
from scripts.tracing.kernels import CUSTOM, KERNELS, Kernels, UncountedOperatorError, kernels_of


def test_what_is_not_named_is_one_kernel():
    assert kernels_of("aten::mul") == 1
    assert kernels_of("mul") == 1
    assert kernels_of("prim::device") == 0
    assert kernels_of("aten::empty_strided") == 0
    assert kernels_of("aten::sort") == KERNELS["sort"].launches > 1


def test_lists_of_tensors_take_a_launch_for_so_many_elements():
    row = KERNELS["_fused_adamw_"]
    counts = (0, 1, row.elements, row.elements + 1, 3 * row.elements)
    assert [kernels_of("_fused_adamw_", n) for n in counts] == [1, 1, 1, 2, 3]
    assert kernels_of("_foreach_norm", row.elements + 1) == 4


def test_an_operator_of_another_library_must_be_declared(monkeypatch):
    with pytest.raises(UncountedOperatorError, match=r"operator mine::twice .* CUSTOM"):
        kernels_of("mine::twice")
    monkeypatch.setattr(kernels, "CUSTOM", {**CUSTOM, "mine::twice": Kernels(2, "two halves")})
    assert kernels_of("mine::twice") == 2


def test_the_table_names_operators_that_torch_has():
    missing = [name for name in KERNELS if not hasattr(torch.ops.aten, name)]
    assert missing == []
    assert all(row.reason and row.launches >= 0 for row in KERNELS.values())
