"""The multi-token prediction block of DeepSeek-V3 and GLM-4.5: a layer like the last one, against its formula.

The formula is written in plain torch on the tensors of the published names, as vLLM's ``deepseek_mtp`` and
``glm4_moe_mtp`` and SGLang's ``deepseek_nextn`` compute it: the embedding comes first, the hidden state is the output
of the model's final norm, and the block ends with a norm of its own before the shared head.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.checkpoints.ownership.identity import match_model
from megapar.model.architectures import ARCHITECTURES
from megapar.model.decoder.model import Decoder
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.facts import differences
from megapar.model.hugging_face.tensors import export_piece
from megapar.model.spec import parameter_counts, table_of
from megapar.moe.sizes import MoeSizes
from tests.model.small import DENSE, LATENT, MOE, batch_for, build, named_tensors

ROUTED = MoeSizes(
    **{"hidden_size": 32, "ffn_hidden_size": 16, "num_experts": 8, "topk": 3, "shared_experts": 1, "score": "sigmoid"},
    **{"groups": 4, "group_topk": 2, "group_score_topk": 2, "scaling": 2.5},
)
LAYER = {"mtp_depth": 1, "mtp_block": "layer", "num_layers": 3, "first_k_dense": 1, "tie_embeddings": False}
DEEPSEEK = replace(LATENT, **LAYER, moe=ROUTED, attention_latent_norm_epsilon=1e-6)
GLM = replace(
    *(DENSE,),
    **{**LAYER, "add_qkv_bias": True, "qk_norm": True, "rotary_percent": 0.5},
    moe=replace(ROUTED, groups=1, group_topk=1, group_score_topk=0),
)
MODELS = {"DeepseekV3ForCausalLM": DEEPSEEK, "Glm4MoeForCausalLM": GLM}


def published_tensors(model: Decoder, name: str) -> dict[str, Tensor]:
    """Return all tensors of the model by the names and in the row order of the class."""
    architecture, found = ARCHITECTURES[name], {}
    values = dict(named_tensors(model))
    for spec in table_of(model.sizes):
        for piece in spec.pieces:
            hf, part = export_piece(architecture, spec, piece, values[spec.name].detach())
            assert hf is not None
            found[hf] = part.reshape(architecture.hf_shape(piece.hf_name, piece.hf_shape))
    return found


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def cosines(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    rates = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, theta: float) -> Tensor:
    """Rotate features (2 i, 2 i + 1) of x [B, N, S, D]."""
    cos, sin = cosines(x.shape[-2], x.shape[-1], theta)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rotate_halves(x: Tensor, dim: int, theta: float) -> Tensor:
    """Rotate features (i, i + dim / 2) of the leading ``dim`` of x [B, N, S, D]."""
    cos, sin = cosines(x.shape[-2], dim, theta)
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    return torch.cat((first * cos - second * sin, first * sin + second * cos, x[..., dim:]), dim=-1)


def heads(x: Tensor, number: int) -> Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def latent_attention(x: Tensor, w: dict[str, Tensor], s: DecoderSizes) -> Tensor:
    def norm(y: Tensor, name: str) -> Tensor:
        return rms(y, w[f"self_attn.{name}.weight"], s.attention_latent_norm_epsilon)

    number, plain, rotated = s.num_attention_heads, s.qk_head_dim, s.qk_pos_emb_head_dim
    q = heads(norm(x @ w["self_attn.q_a_proj.weight"].T, "q_a_layernorm") @ w["self_attn.q_b_proj.weight"].T, number)
    latent, key = (x @ w["self_attn.kv_a_proj_with_mqa.weight"].T).split((s.kv_lora_rank, rotated), dim=-1)
    kv = heads(norm(latent, "kv_a_layernorm") @ w["self_attn.kv_b_proj.weight"].T, number)
    key = rotate_pairs(key[:, None], s.rope_theta).expand(-1, number, -1, -1)
    q = torch.cat((q[..., :plain], rotate_pairs(q[..., plain:], s.rope_theta)), dim=-1)
    k = torch.cat((kv[..., :plain], key), dim=-1)
    return attend(q, k, kv[..., plain:]) @ w["self_attn.o_proj.weight"].T


def grouped_attention(x: Tensor, w: dict[str, Tensor], s: DecoderSizes) -> Tensor:
    def part(name: str, number: int) -> Tensor:
        return heads(x @ w[f"self_attn.{name}_proj.weight"].T + w[f"self_attn.{name}_proj.bias"], number)

    def turned(y: Tensor, name: str) -> Tensor:
        y = rms(y, w[f"self_attn.{name}_norm.weight"], s.layernorm_epsilon)
        return rotate_halves(y, int(s.head_dim * s.rotary_percent), s.rope_theta)

    shared = s.num_attention_heads // s.num_query_groups
    q = turned(part("q", s.num_attention_heads), "q")
    k = turned(part("k", s.num_query_groups), "k").repeat_interleave(shared, 1)
    v = part("v", s.num_query_groups).repeat_interleave(shared, 1)
    return attend(q, k, v) @ w["self_attn.o_proj.weight"].T


def mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(x: Tensor, w: dict[str, Tensor], moe: MoeSizes) -> Tensor:
    """Sigmoid scores; choices from the best groups by score and correction bias; weights are the scores alone."""
    scores = (x @ w["mlp.gate.weight"].T).sigmoid()
    biased = scores + w["mlp.gate.e_score_correction_bias"]
    if moe.groups > 1:
        best = (
            biased.unflatten(-1, (moe.groups, -1)).topk(2, dim=-1).values.sum(-1).topk(moe.group_topk, dim=-1).indices
        )
        kept = torch.zeros(*x.shape[:-1], moe.groups).scatter(-1, best, 1.0).bool()
        size = moe.num_experts // moe.groups
        biased = biased.masked_fill(~kept.repeat_interleave(size, -1), -torch.inf)
    chosen = torch.zeros_like(scores).scatter(-1, biased.topk(moe.topk, dim=-1).indices, 1.0)
    weights = scores * chosen
    weights = weights / weights.sum(-1, keepdim=True) * moe.scaling
    outputs = torch.stack([mlp(x, w, f"mlp.experts.{e}") for e in range(moe.num_experts)], dim=-1)
    return (outputs * weights[..., None, :]).sum(-1) + mlp(x, w, "mlp.shared_experts")


def block(hidden: Tensor, then: Tensor, tensors: dict[str, Tensor], s: DecoderSizes) -> Tensor:
    """Return the logits of the block: hidden [B, S, H] after the final norm, tokens t + 1 [B, S]."""
    own = f"model.layers.{s.num_layers}."
    w = {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)}
    epsilon = s.layernorm_epsilon
    embedded = rms(tensors["model.embed_tokens.weight"][then], w["enorm.weight"], epsilon)
    x = torch.cat((embedded, rms(hidden, w["hnorm.weight"], epsilon)), dim=-1) @ w["eh_proj.weight"].T
    attention = latent_attention if s.multi_latent_attention else grouped_attention
    x = x + attention(rms(x, w["input_layernorm.weight"], epsilon), w, s)
    assert s.moe is not None
    x = x + experts(rms(x, w["post_attention_layernorm.weight"], epsilon), w, s.moe)
    return rms(x, w["shared_head.norm.weight"], epsilon) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("name", MODELS)
def test_the_published_block_by_its_formula(name: str) -> None:
    sizes = MODELS[name]
    model = build(sizes, dtype=torch.float64)
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(5)
    for bias in model.correction_biases():
        bias.copy_(0.2 * torch.randn(bias.shape, dtype=bias.dtype, generator=generator))
    batch = batch_for(sizes)
    batch["labels"] = torch.cat((batch["tokens"][:, 1:], batch["tokens"][:, :1]), dim=1)
    got = model(batch).sums["mtp"]
    hidden, _, _ = model._run(batch, None)
    tensors = published_tensors(model, name)
    logits = block(hidden, batch["tokens"].roll(-1, 1), tensors, sizes)
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=0)


def test_its_gradients_reach_all_parameters_and_its_experts_have_a_row_of_load() -> None:
    model = build(DEEPSEEK, dtype=torch.float64)
    assert isinstance(model, Decoder)
    terms = model(batch_for(DEEPSEEK))
    assert (len(terms.load), model.load_rows) == (3, [0, 1, 2])
    assert terms.load.sum(-1).tolist() == [2 * 16 * 3] * 3
    assert (DEEPSEEK.moe_layers, DEEPSEEK.routed_layers) == ((1, 2), (1, 2, 3))
    terms.sums["mtp"].backward()
    untouched = {
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    }
    assert untouched == set()


def test_its_correction_bias_moves() -> None:
    model = build(DEEPSEEK, dtype=torch.float64)
    assert isinstance(model, Decoder)
    load = model(batch_for(DEEPSEEK)).load
    assert model.mtp is not None
    bias = model.correction_biases()[2]
    assert model.mtp.block.moe is not None
    assert bias is model.mtp.block.moe.router.correction_bias
    bias.zero_()
    model.update_router_bias(load, 0.5)
    row = load[2].to(torch.float64)
    torch.testing.assert_close(bias, (0.5 * (row.mean() - row).sign()).to(bias.dtype), rtol=0, atol=0)


def test_a_block_after_a_dense_layer_is_dense_with_its_own_norm() -> None:
    sizes = replace(MOE, mtp_depth=1, mtp_block="layer", first_k_dense=0, moe_pattern=(1, 0))
    names = {row.name for row in table_of(replace(sizes, num_layers=2)) if row.name.startswith("mtp.")}
    assert {"mtp.block.mlp.down.weight", "mtp.final_norm.weight"} < names
    assert not any(".moe." in name for name in names)
    published = {row.name for row in table_of(replace(MOE, mtp_depth=1)) if row.name.startswith("mtp.")}
    assert published == names - {"mtp.final_norm.weight"}  # that of ERNIE 4.5, after a layer with experts


def test_counts_leave_the_block_out_and_old_checkpoints_have_a_dense_one() -> None:
    without = replace(DEEPSEEK, mtp_depth=0)
    assert parameter_counts(DEEPSEEK) == parameter_counts(without)
    assert without.facts()["mtp_block"] == "dense"
    assert DEEPSEEK.facts()["mtp_block"] == "layer"
    assert DecoderSizes.fact_defaults()["mtp_block"] == "dense"
    with pytest.raises(ValueError, match="mtp_block"):
        replace(DEEPSEEK, mtp_block="experts")


@pytest.mark.parametrize("block", ["dense", "layer"])
@pytest.mark.parametrize("old", [False, True])
def test_weights_alone_come_with_or_without_the_block(block: str, old: bool) -> None:
    """old: the checkpoint is from before there were two blocks."""
    ahead, plain = (replace(DEEPSEEK, mtp_block=block, mtp_depth=depth).facts() for depth in (1, 0))
    if old:
        del plain["mtp_block"]
    for stored, expected in ((plain, ahead), (ahead, plain)):
        written = json.loads(json.dumps(stored))
        assert differences(written, match_model(written, expected, weights_only=True).facts) == ""
        assert "--mtp-depth" in differences(written, match_model(written, expected, weights_only=False).facts)
