"""Translated lines of Paddle and MindSpeed train as these's formulas say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megapar.core.optimizer.gradient_norm import clip_gradients
from megapar.core.sharding.master_shard import MasterShard
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats, router_sums
from megapar.tools.translation.translated import translate
from megapar.training.step.schedules import LearningRate
from tests.tools.translation.test_megatron_numbers import given, hold_two_steps, ours

USUAL = (
    "--max_seq_length 16 --max_steps 9 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --seed 7"
    " --hidden_size 32 --num_attention_heads 4 --num_key_value_heads 2 --intermediate_size 48 --vocab_size 128"
    " --learning_rate 0.01 --adam_beta1 0.8 --adam_beta2 0.9 --adam_epsilon 1e-3 --rope_theta 500 --max_grad_norm 0.2"
    " --fp16_opt_level O2 --attention_probs_dropout_prob 0 --hidden_dropout_prob 0"
)
# As scripts write them; all else is Paddle's default.
LINES = {
    "PaddleNLP": f"{USUAL} --num_hidden_layers 2 --min_learning_rate 0.004 --lr_scheduler_type cosine"
    " --weight_decay 0.3 --rms_norm_eps 1e-3 --initializer_range 0.05 --tie_word_embeddings false --hidden_act silu",
    "ERNIE 4.5": f"{USUAL} --num_hidden_layers 4 --remove_tail_layer 1 --min_lr 0.004 --lr_scheduler wsd:5"
    " --decay_function 1-sqrt --use_moe true --moe_num_experts 8 --moe_k 2 --moe_intermediate_size 24"
    " --moe_layer_start_index 1 --moe_num_shared_experts 2 --moe_aux_loss_lambda 0.05 --moe_group ep"
    " --moe_orthogonal_loss_lambda 0.1 --moe_gate top2_fused --use_rmsnorm true --tie_word_embeddings true",
}
# The same in the words of the formulas' model.
FORMULAS = {
    "PaddleNLP": "--num-layers 2 --lr 0.01 --min-lr 0.004 --lr-decay-style cosine --train-iters 9 --weight-decay 0.3"
    " --norm-epsilon 1e-3 --untie-embeddings-and-output-weights --clip-grad 0.2 --moe-router-topk 2",
    "ERNIE 4.5": "--num-layers 3 --lr 0.01 --lr-decay-style constant --train-iters 9 --weight-decay 0"
    " --norm-epsilon 1e-6 --clip-grad 0.2 --moe-router-topk 2",
}
ALWAYS = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --rotary-base 500 --adam-beta1 0.8"
    " --adam-beta2 0.9 --adam-eps 1e-3"
)


@pytest.mark.parametrize("name", LINES)
def test_two_steps_are_paddle_s(name: str) -> None:
    line, formula = given(LINES[name]), given(f"{FORMULAS[name]} {ALWAYS}")
    # Of k choices, each expert's share of tokens adds up to k there; the model's balance divides by k.
    formula["moe-aux-loss-coeff"] = str(int(line.get("moe_k", 1)) * float(line.get("moe_aux_loss_lambda", 0)))

    def orthogonal(weights: dict[str, torch.Tensor], layers: Iterable[str]) -> torch.Tensor:
        """ERNIE 4.5's orthogonal loss: of each router's rows."""
        total = torch.zeros((), dtype=torch.float64)
        for name in layers:
            rows = weights[f"{name}.router.weight"]
            rows = rows / rows.norm(dim=1, keepdim=True)
            rest = rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype)
            total = total + float(line.get("moe_orthogonal_loss_lambda", 0)) * rest.square().sum() / rest.numel()
        return total

    run = hold_two_steps(ours(LINES[name], "paddle"), formula, orthogonal)
    assert min(run["norms"]) > 0.2  # both are clipped
    if name == "ERNIE 4.5":
        assert run["states"][0]["embedding.word.weight"].std() == pytest.approx(math.sqrt(0.3333 / 32), rel=0.03)


def test_ernie_s_balance_counts_every_choice() -> None:
    """Its cal_aux_loss_func: sum of shares of scores and of tokens, times experts; tokens count once per choice."""
    logits = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores, topk = logits.softmax(1), 3
    chosen = scores.topk(topk, dim=1).indices
    dispatched = torch.zeros_like(scores).scatter_(1, chosen, 1.0).sum(0)
    theirs = (scores.sum(0) / 12 * dispatched / 12).sum() * 5
    item = translate(["--moe_aux_loss_lambda", "0.5", "--moe_k", str(topk)], "paddle")[0]
    coefficient = float(item.ours.removeprefix("--moe-aux-loss-coeff "))
    balance = MoeStats.of(router_sums(logits.logsumexp(1), scores, chosen, None), 12, topk).aux
    torch.testing.assert_close(coefficient * balance, 0.5 * theirs, rtol=1e-12, atol=0)


def test_half_life_is_no_curve_of_ours() -> None:
    """What the verdict of --decay_function says: 0.05 to the share, stretched from 1 to 0."""
    theirs = [(0.05**share - 0.05) / 0.95 for share in (0.25, 0.5, 0.75)]
    for shape in ("linear", "cosine", "exponential", "minus_sqrt"):
        rate = LearningRate(1.0, 0.0, "wsd", 0, 4, 4, shape)
        assert [rate.at(step) for step in (1, 2, 3)] != pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("size", [0.01, 0.9, 1.1, 50.0])
def test_gradients_are_clipped_as_paddle_s_to_a_millionth(size: float) -> None:
    """Theirs: limit / (max(norm, limit) + 1e-6), which also scales what is not clipped."""
    part = SimpleNamespace(grad=torch.zeros(0))
    part.grad = torch.tensor([0.6, 0.8], dtype=torch.float64) * size
    expected = part.grad / (max(size, 1.0) + 1e-6)
    clip_gradients([cast(MasterShard, part)], torch.tensor(size, dtype=torch.float64), 1.0)
    torch.testing.assert_close(part.grad, expected, rtol=1.01e-6, atol=0)


@pytest.mark.parametrize(("tokens", "factor", "least"), [(64, 1.0, 4), (64, 1.1, 4), (7, 1.25, 4), (1000, 0.5, 0)])
def test_the_capacity_is_mindspeed_s(tokens: int, factor: float, least: int) -> None:
    """Its deepspeed_moe: ceil(tokens / experts · factor · k), at least the minimum."""
    line = f"--moe-train-capacity-factor {factor} --moe-model-type deepspeed_moe"
    item = translate(line.split(), "mindspeed")[0]
    sizes = MoeSizes(
        hidden_size=8, ffn_hidden_size=8, num_experts=8, topk=2, capacity_factor=factor, min_capacity=least
    )
    assert item.ours == f"--moe-capacity-factor {factor}"
    assert sizes.capacity(tokens) == max(math.ceil(round(tokens / 8 * factor * 2, 9)), least)
