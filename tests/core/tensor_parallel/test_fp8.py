"""Products in fp8, emulated: the roundings of the hardware on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.fp8 import odd_widths
from tests.model.small import DENSE, LATENT, MOE, batch_for, build, total

pytest.importorskip("torchao", reason="torchao is an extra")
from megapar.core.tensor_parallel.fp8 import Fp8Linear


def gradients(sizes, product=None):
    model = build(sizes, dtype=torch.bfloat16, execution=Execution(fp8=product))
    loss = total(model, batch_for(sizes))
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters()}


def test_a_product_rounds_to_e4m3_by_the_largest_element():
    x = torch.tensor([[1.0, 0.3]], dtype=torch.bfloat16)
    weight = torch.eye(2, dtype=torch.bfloat16)
    y = Fp8Linear(emulated=True)(x, weight, torch.ones(2, dtype=torch.bfloat16))
    scale = 448 / x.abs().max()
    rounded = (x * scale).to(torch.float8_e4m3fn).float() / scale
    torch.testing.assert_close(y.float(), rounded + 1, rtol=1e-2, atol=0)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("sizes", [DENSE, MOE, LATENT], ids=["dense", "moe", "latent attention"])
def test_a_model_in_fp8_stays_near_bf16(sizes):
    loss, plain = gradients(sizes)
    loss8, found = gradients(sizes, Fp8Linear(emulated=True))
    assert loss8 == pytest.approx(loss, rel=0.02)
    assert loss8 != loss
    of_attention = ("down", "kv_up") if sizes is LATENT else ("qkv",)
    for name in (*(f"layers.0.attention.{part}.weight" for part in of_attention), "layers.0.mlp.down.weight"):
        angle = torch.cosine_similarity(plain[name].flatten().float(), found[name].flatten().float(), 0)
        assert float(angle) > 0.95, name


def test_widths_that_the_hardware_does_not_take_are_named():
    assert odd_widths(build(DENSE)) == []
    (odd,) = odd_widths(build(replace(LATENT, kv_lora_rank=32, q_lora_rank=8, v_head_dim=8, num_layers=1)))[:1]
    assert odd == "layers.0.attention.down [56, 32]"
    odd = odd_widths(build(replace(DENSE, ffn_hidden_size=40)))
    assert [name.split(" ")[0] for name in odd] == [
        *("layers.0.mlp.down", "layers.1.mlp.down"),
    ]
