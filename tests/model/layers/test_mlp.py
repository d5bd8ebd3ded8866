"""The shared expert with a gate against its formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megapar.core.comm.axis import Axis
from megapar.core.recompute.replay import Replay
from megapar.model.layers.mlp import Mlp, TokenGatedMlp

H, WIDTH = 6, 10


def test_output_and_gradients_are_those_of_qwen2_moe_s_formula() -> None:
    mlp = TokenGatedMlp(
        *(H, WIDTH),
        **{"gated": True, "bias": False, "mp": Axis.single("mp"), "sequence_parallel": False},
        dtype=torch.float64,
        device=None,
    )
    random = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.5, generator=random)
    x = torch.randn(2, 5, H, dtype=torch.float64, generator=random).requires_grad_()
    upstream = torch.randn(2, 5, H, dtype=torch.float64, generator=random)
    gate, up = mlp.gate_up.weight if mlp.gate_up is not None else (None, None)
    inner = F.silu(x @ gate.T) * (x @ up.T)
    wanted = torch.sigmoid(x @ mlp.token_gate.T) * (inner @ mlp.down.weight.T)
    got = mlp(x)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
    leaves = [x, *mlp.parameters()]
    for a, b in zip(*(torch.autograd.grad((y * upstream).sum(), leaves) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    onto = torch.randn(10, H, dtype=torch.float64, generator=random)
    torch.testing.assert_close(mlp(x, None, onto), onto + wanted.flatten(0, 1), rtol=1e-13, atol=1e-13)
    assert not mlp.adds_onto
    torch.testing.assert_close(mlp(x, Replay()), wanted, rtol=1e-13, atol=1e-13)


def test_geglu_is_gemma_s() -> None:
    options = {"mp": Axis.single("mp"), "sequence_parallel": False, "dtype": torch.float64, "device": None}
    mlp, random = Mlp(H, WIDTH, gated=True, tanh=True, bias=False, **options), torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, generator=random)
    x = torch.randn(2, 5, H, dtype=torch.float64, generator=random)
    gate, up = mlp.gate_up.weight if mlp.gate_up is not None else (None, None)
    z = x @ gate.T
    gelu = 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    torch.testing.assert_close(mlp(x), gelu * (x @ up.T) @ mlp.down.weight.T, rtol=1e-13, atol=1e-13)
