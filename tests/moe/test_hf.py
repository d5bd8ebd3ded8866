"""The layer against transformers' ERNIE 4.5 MoE block, and the router against those of other classes."""

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.configuration_ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megapar.core.comm.axis import Axis
from megapar.model.layers.mlp import Mlp
from megapar.moe.layer import MoeLayer
from megapar.moe.router import Router, gate_weights
from megapar.moe.sizes import MoeSizes

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


class _AsDouble(TorchFunctionMode):
    """Reads fp32 as fp64 wherever a class names it, so that its router computes in fp64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return function(*args, **kwargs)


# As published, but for odd numbers: their router, its configuration, and ours.
E, V2, V3 = 12, "group_limited_greedy", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
OF_V3 = {
    "norm_topk_prob": "on",
    "score": "sigmoid",
    "scaling": 2.5,
    "groups": 4,
    "group_topk": 2,
    "group_score_topk": 2,
}
OF_V2 = {"scaling": 1.7, "norm_topk_prob": "off"}
MIXED = {"n_group": 4, "topk_group": 2, "topk_method": V2, "routed_scaling_factor": 1.7}
ROUTERS = {
    "DeepseekV3": (DeepseekV3TopkRouter, {**V3, "norm_topk_prob": True}, {**OF_V3}, (1, 3, 4)),
    "DeepseekV3 as they are": (
        *(DeepseekV3TopkRouter, {**V3, "norm_topk_prob": False}, {**OF_V3, "norm_topk_prob": "off"}, (1, 3, 4)),
    ),
    "Kimi": (
        DeepseekV3TopkRouter,
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8, "norm_topk_prob": True},
        {"score": "sigmoid", "scaling": 2.8},
        (3,),
    ),
    "Glm4Moe": (Glm4MoeTopkRouter, {**V3, "norm_topk_prob": True}, {**OF_V3}, (1, 3)),
    "DeepseekV2": (
        *(DeepseekV2TopkRouter, MIXED, {**OF_V2, "groups": 4, "group_topk": 2, "group_score_topk": 1}, (1, 3, 4)),
    ),
    "DeepseekV2 greedy": (
        *(DeepseekV2TopkRouter, {"topk_method": "greedy", "routed_scaling_factor": 1.7}, OF_V2, (1, 3)),
    ),
    "Qwen2Moe": (Qwen2MoeTopKRouter, {"norm_topk_prob": False}, {"norm_topk_prob": "off"}, (1, 3)),
    "Qwen3Moe": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, {"norm_topk_prob": "on"}, (1, 3)),
    "Mixtral": (MixtralTopKRouter, {}, {"norm_topk_prob": "on"}, (1, 3)),
    "GraniteMoe": (GraniteMoeTopKRouter, {}, {"norm_topk_prob": "on"}, (1, 3)),
}
CASES = [(name, topk) for name, (*_, counts) in ROUTERS.items() for topk in counts]


@pytest.mark.parametrize(("name", "topk"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_weights_of_published_routers_and_their_gradients(name, topk):
    """To 1e-12, wherever the weights do not come from another choice among equals."""
    kind, of_class, of_ours, _ = ROUTERS[name]
    config = SimpleNamespace(
        hidden_size=HIDDEN, num_experts_per_tok=topk, num_experts=E, num_local_experts=E,
        **{"n_group": None, "topk_group": None, **of_class},
    )  # fmt: skip
    theirs = kind(config).double()
    ours = Router(MoeSizes(HIDDEN, FFN, E, topk, **of_ours), dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    (weight,) = theirs.parameters()
    torch.nn.init.normal_(weight, std=0.3, generator=random)
    with torch.no_grad():
        ours.weight.copy_(weight)
        if hasattr(theirs, "e_score_correction_bias"):
            bias = torch.randn(E, dtype=torch.float64, generator=random) * 0.2
            theirs.e_score_correction_bias.copy_(bias)
            ours.correction_bias.copy_(bias)
    x = torch.randn(40, HIDDEN, dtype=torch.float64, generator=random)
    upstream = torch.randn(40, E, dtype=torch.float64, generator=random)
    with _AsDouble():
        wanted, chosen = by_expert(theirs, x)
    routing = ours(x)
    assert torch.equal(routing.experts.sort(1).values, chosen.sort(1).values)
    sizes = ours.sizes
    weights = gate_weights(routing, None, over_kept=False, scaling=sizes.scaling, renormalizes=sizes.renormalizes)
    got = torch.zeros(40, E, dtype=torch.float64).scatter(1, routing.experts, weights)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    (of_theirs,) = torch.autograd.grad((wanted * upstream).sum(), weight)
    (of_ours,) = torch.autograd.grad((got * upstream).sum(), ours.weight)
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-11, atol=1e-12)


def by_expert(router, x):
    """Their weights [T, E], 0 for experts that are not chosen, and their choices [T, k]."""
    _, weights, chosen = router(x)
    return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, chosen, weights), chosen
