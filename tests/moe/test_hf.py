"""The layer against transformers' ERNIE 4.5 MoE block, with the same weights."""

import pytest
import torch
from transformers.models.ernie4_5_moe.configuration_ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock

from megapar.core.comm.axis import Axis
from megapar.model.decoder.sizes import MoeSizes
from megapar.model.layers.mlp import Mlp
from megapar.moe.layer import MoeLayer
from megapar.moe.router import gate_weights

HIDDEN, FFN, EXPERTS = 32, 16, 8


def twins(topk, shared_experts):
    """Their block and our layer, weights equal, router bias not zero."""
    config = Ernie4_5_MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=FFN,
        moe_num_experts=EXPERTS,
        moe_k=topk,
        moe_num_shared_experts=shared_experts,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=2,
    )
    theirs = Ernie4_5_MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    shared = None
    if shared_experts:
        shared = Mlp(
            HIDDEN,
            shared_experts * FFN,
            gated=True,
            bias=False,
            mp=Axis.single("mp"),
            sequence_parallel=False,
            dtype=torch.float32,
            device=None,
        )
    ours = MoeLayer(MoeSizes(HIDDEN, FFN, EXPERTS, topk, shared_experts=shared_experts), shared=shared)
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.weight)
        ours.router.correction_bias.copy_(theirs.gate.moe_statics.e_score_correction_bias[0])
        ours.experts.gate_up.copy_(theirs.experts.gate_up_proj.view_as(ours.experts.gate_up))
        ours.experts.down.copy_(theirs.experts.down_proj)
        if shared is not None:
            mlp = theirs.shared_experts
            shared.gate_up.weight.copy_(torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight]))
            shared.down.weight.copy_(mlp.down_proj.weight)
    return theirs, ours


@pytest.mark.parametrize(("topk", "shared_experts"), [(2, 0), (4, 2)])
def test_router_and_output_are_equal(topk, shared_experts):
    theirs, ours = twins(topk, shared_experts)
    x = torch.randn(2, 10, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _, weights, experts = theirs.gate(x.flatten(0, 1))
        routing = ours.router(x.flatten(0, 1))
        assert torch.equal(routing.experts, experts)
        torch.testing.assert_close(gate_weights(routing, None, over_kept=False), weights, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-5, atol=1e-5)
    assert {"shared.gate_up.weight", "shared.down.weight"} <= set(ours.state_dict()) or not shared_experts
