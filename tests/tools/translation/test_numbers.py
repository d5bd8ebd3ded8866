"""Translated lines of Paddle and MindSpeed train as these's formulas say; where each flag they share is held to one."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from megapar.config.read import normal, spellings
from megapar.core.optimizer.gradient_norm import clip_gradients
from megapar.core.optimizer.loss_scale import LossScale
from megapar.core.sharding.master_shard import MasterShard
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats, router_sums
from megapar.tools.translation.translated import Translated, equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import CHANGING, IMPLIED, RENAMED, SAME
from megapar.training.step.schedules import LearningRate
from tests.support.ranks import run_ranks
from tests.tools.translation.megatron_model import Adam, loss
from tests.tools.translation.tables import declared, values_of
from tests.tools.translation.test_megatron_numbers import ROOT, given, names_of_tests, two_steps

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


def ours(line: str) -> list[str]:
    """The command that a line is translated to, in fp64; nothing of it may be another training."""
    items = translate(shlex.split(line), "paddle")
    items += implicit_defaults(items, "paddle")
    assert [item for item in items if item.verdict in CHANGING] == []
    flags = [word for text in equivalent(items)[1] for word in shlex.split(text)]
    return [*flags, "--data-path", "mock", "--dtype", "fp64", "--device", "cpu"]


def added_losses(
    weights: dict[str, torch.Tensor], loads: dict[str, torch.Tensor], line: dict[str, str]
) -> torch.Tensor:
    """ERNIE 4.5's orthogonal loss: of each router's rows."""
    total = torch.zeros((), dtype=torch.float64)
    for name in loads:
        rows = weights[f"{name}.router.weight"]
        rows = rows / rows.norm(dim=1, keepdim=True)
        rest = rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype)
        total = total + float(line.get("moe_orthogonal_loss_lambda", 0)) * rest.square().sum() / rest.numel()
    return total


@pytest.mark.parametrize("name", LINES)
def test_two_steps_are_paddle_s(name: str) -> None:
    """Two micro-batches a step: weights and norms after the first and the second step."""
    line, formula = given(LINES[name]), given(f"{FORMULAS[name]} {ALWAYS}")
    # Of k choices, each expert's share of tokens adds up to k there; the model's balance divides by k.
    formula["moe-aux-loss-coeff"] = str(int(line.get("moe_k", 1)) * float(line.get("moe_aux_loss_lambda", 0)))
    run = run_ranks(1, two_steps, ours(LINES[name]), group=False)[0]
    weights = {key: torch.from_numpy(value.copy()) for key, value in run["states"][0].items()}
    trained = [key for key in weights if not key.endswith("correction_bias")]
    if name == "ERNIE 4.5":
        assert weights["embedding.word.weight"].std().item() == pytest.approx(math.sqrt(0.3333 / 32), rel=0.03)
    adam = Adam(formula)
    for step in range(2):
        for key in trained:
            weights[key].requires_grad_(True).grad = None
        for first in (4 * step, 4 * step + 2):
            tokens, labels = (torch.from_numpy(run[kind][first : first + 2]) for kind in ("tokens", "labels"))
            value, balance = loss(weights, tokens, labels, formula)
            ((value + added_losses(weights, balance.load, line)) / 2).backward()
        gradients = {key: weights[key].grad for key in trained}
        weights = {key: tensor.detach() for key, tensor in weights.items()}
        total = adam.step(weights, gradients)  # type: ignore[arg-type]
        assert total > 0.2
        assert run["norms"][step] == pytest.approx(total, rel=1e-9)
        for key, tensor in run["states"][step + 1].items():
            np.testing.assert_allclose(tensor, weights[key].numpy(), rtol=1e-9, atol=1e-11, err_msg=key)


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


def annealed(step: int, peak: float, floor: float, style: str, warmup: int, end: int, steady: int) -> float:
    """A step's rate in PaddleNLP's (Linear|Cosine)AnnealingWithWarmupDecay and ERNIE 4.5's wsd, behind the warm-up."""
    if style == "constant":
        return peak
    if style == "wsd":
        share = (step - steady) / max(1, end - steady)
        return peak * ((1 - math.sqrt(share)) * (1 - floor / peak) + floor / peak) if step >= steady else peak
    share = (step - warmup) / (end - warmup)
    left = 1 - share if style == "linear" else 0.5 * (math.cos(math.pi * share) + 1)
    return floor + left * (peak - floor)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_the_learning_rate_behind_the_warm_up_is_paddle_s(style: str, warmup: int) -> None:
    """In the warm-up ours is one step ahead, as the row of --warmup_steps says."""
    scheduler = "--lr_scheduler wsd:30 --decay_function 1-sqrt" if style == "wsd" else f"--lr_scheduler_type {style}"
    items = translate(shlex.split(f"{scheduler} --max_steps 40"), "paddle")
    words = dict(zip(*[iter(" ".join(item.ours for item in items).split())] * 2, strict=True))
    rate = LearningRate(
        3.0,
        0.5,
        words["--lr-decay-style"],
        warmup,
        40,
        int(words.get("--lr-wsd-decay-iters", 0)),
        words.get("--lr-wsd-decay-style", "linear"),
    )
    theirs = [annealed(step, 3.0, 0.5, style, warmup, 40, 30) for step in range(warmup, 40)]
    assert [rate.at(step) for step in range(warmup, 40)] == pytest.approx(theirs, rel=1e-12)
    assert [rate.at(step) for step in range(warmup)] == pytest.approx(
        [3.0 * (step + 1) / 7 for step in range(warmup)], rel=1e-12
    )
    if warmup:
        assert "one step ahead" in translate(["--warmup_steps", "7"], "paddle")[0].reason


def test_half_life_is_no_curve_of_ours() -> None:
    """What the verdict of --decay_function says: 0.05 to the share, stretched from 1 to 0."""
    theirs = [(0.05**share - 0.05) / 0.95 for share in (0.25, 0.5, 0.75)]
    for shape in ("linear", "cosine", "exponential", "minus_sqrt"):
        rate = LearningRate(1.0, 0.0, "wsd", 0, 4, 4, shape)
        assert [rate.at(step) for step in (1, 2, 3)] != pytest.approx(theirs, rel=0.05)


def test_the_loss_scale_moves_as_paddle_s() -> None:
    """GradScaler: twice as much after 2000 good steps in a row, half at an overflow (decr_every_n_nan_or_inf 1)."""
    scaler = next(
        item for item in implicit_defaults(translate(["--fp16", "true"], "paddle"), "paddle") if "window" in item.ours
    )
    assert scaler.ours == "--loss-scale-window 2000 --hysteresis 1"
    value, good = 32768.0, 0
    mine = LossScale(32768.0, minimum=1.0, factor=2.0, window=2000, hysteresis=1)
    draw = random.Random(5)
    for _ in range(60_000):
        overflow = draw.random() < 3e-4
        if overflow:
            value, good = max(1.0, value * 0.5), 0
        else:
            good += 1
            if good == 2000:
                value, good = value * 2.0, 0
        mine.update(overflow=overflow)
        assert mine.value == value


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


HERE = "tests/tools/translation/test_numbers.py"
MEGATRON = "tests/tools/translation/test_megatron_numbers.py"
STEPS = f"{HERE}::test_two_steps_are_paddle_s"
RATE = f"{HERE}::test_the_learning_rate_behind_the_warm_up_is_paddle_s"
SCALE = f"{HERE}::test_the_loss_scale_moves_as_paddle_s"
SLICES = "tests/model/test_ampipe.py::test_two_ranks_equal_one_and_hooks_fire_once"
GRANITE = "tests/checkpoints/export/test_convert.py::test_logits_on_every_layout"
PATTERN = "tests/model/test_layer_pattern.py::test_a_number_gives_experts_to_every_nth_layer_as_megatron_does"
GATED = "tests/model/layers/test_mlp.py::test_output_and_gradients_are_those_of_qwen2_moe_s_formula"
ROUTERS = "tests/model/conformance/test_conformance.py::test_conformance"
LAYOUTS = "tests/equivalence/test_equivalence.py::test_fp64"
ROUTER = "tests/moe/test_router.py"
LOSS = "tests/model/layers/test_loss.py::test_equals_the_reference"
MASTERS = f"{MEGATRON}::test_masters_gradients_and_moments_are_fp32"

OF_PADDLE = ("paddlenlp", "paddleformers", "ernie_4_5", "paddle_fleet")
OF_MINDSPEED = ("mindspeed", "mindspeed_llm")
# Flags that no line has: where the formula is held.
FLAGS = {
    **dict.fromkeys(("--lr-warmup-iters", "--lr-decay-iters"), RATE),
    **dict.fromkeys(("--loss-scale-window", "--hysteresis", "--loss-scale-factor", "--initial-loss-scale"), SCALE),
    **dict.fromkeys(("--ampipe-degree", "--use-pipe-experts", "--pipe-experts-multi-data"), SLICES),
    **dict.fromkeys(("--ampipe-tp-sp-comm-overlap", "--pipe-experts-multi-stream"), LAYOUTS),
    "--add-bias-linear": f"{MEGATRON}::test_two_steps_are_megatron_s",
    "--normalization": f"{MEGATRON}::test_two_steps_are_megatron_s",
    "--head-dim": f"{MEGATRON}::test_two_steps_are_megatron_s",
    "--moe-z-loss-coeff": f"{MEGATRON}::test_two_steps_are_megatron_s",
    "--moe-router-score-function": f"{ROUTER}::test_sigmoid_scores_are_not_normalised_but_their_sums_are",
    "--global-batch-size": f"{MEGATRON}::test_two_steps_are_megatron_s",
    "--attention-dropout": f"{MEGATRON}::test_dropout_is_of_so_many_and_scales_the_rest",
    "--hidden-dropout": f"{MEGATRON}::test_dropout_is_of_so_many_and_scales_the_rest",
    "--moe-router-bias-update-rate": f"{ROUTER}::test_correction_bias_moves_against_the_load",
    "--moe-router-group-topk": f"{ROUTER}::test_choices_stay_in_the_best_groups",
    "--moe-router-num-groups": f"{ROUTER}::test_choices_stay_in_the_best_groups",
    "--moe-router-topk-scaling-factor": f"{MEGATRON}::test_two_steps_are_megatron_s",
    "--moe-model-type": "tests/moe/test_deepspeed_gates.py::test_kept_pairs_and_weights",
    "--moe-capacity-factor": f"{HERE}::test_the_capacity_is_mindspeed_s",
    "--mtp-depth": "tests/model/decoder/test_mtp.py::test_loss_by_hand",
    "--mtp-block": "tests/model/decoder/test_mtp_layer.py::test_the_published_block_by_its_formula",
    "--mtp-loss-weight": "tests/model/decoder/test_mtp.py::test_loss_by_hand",
    "--moe-layer-freq": PATTERN,
    "--moe-shared-expert-gate": GATED,
    **dict.fromkeys(("--norm-topk-prob", "--no-norm-topk-prob"), ROUTERS),
    "--qk-norm": "tests/model/hugging_face/test_save.py::test_exported_decoder_gives_our_logits",
    **dict.fromkeys(
        ("--embedding-multiplier", "--residual-multiplier", "--logits-scaling", "--softmax-scale"), GRANITE
    ),
    "--multi-latent-attention": "tests/model/conformance/test_conformance.py::test_conformance",
    **dict.fromkeys(("--rotary-percent", "--rope-scaling-type"), f"{MEGATRON}::test_two_steps_are_megatron_s"),
    "--reset-attention-mask": f"{MEGATRON}::test_documents_are_parted_as_megatron_s",
}
IMPLICATIONS = {
    STEPS: """
        apply-rope-fusion attn-implementation fa-version fuse-attention-ffn fuse-attention-qkv fuse-attn-ffn fuse-linear
        fuse-gate-detach-matmul fuse-ln fuse-rms-norm fuse-rope fuse-softmax-mask fuse-swiglu hidden-act optim
        moe-expert-fusion moe-gate moe-norm-gate-logits moe-router-fusion moe-shared-expert-overlap moe-use-fusion-node
        tie-word-embeddings use-fast-layer-norm use-fast-ln use-flash-attention use-flash-attn use-flash-attn-with-mask
        use-fused-linear use-fused-rms-norm use-fused-rope use-global-causal-attn use-mem-eff-attn use-moe
        use-ortho-loss-callback use-rmsnorm use-sparse-flash-attn use-unified-moe using-sonic-moe remove-tail-layer
        moe-with-send-router-loss gradient-merge fuse-grad-merge
        use-fused-mlp use-fused-moe-token-permute-and-unpermute use-fused-rmsnorm use-fusion-attn-v2
        use-fused-rotary-pos-emb use-fused-swiglu use-triton-swiglu-limit moe-layer-freq attention-mask-type
        cp-attention-mask-type noop-layers optimizer-selection
    """,
    f"{MEGATRON}::test_two_steps_are_megatron_s": "add-dense-bias add-qkv-bias moe-router-load-balancing-type seq-aux",
    f"{MEGATRON}::test_dropout_is_of_so_many_and_scales_the_rest": "use-fused-dropout-add",
    f"{MEGATRON}::test_documents_are_parted_as_megatron_s": "packing use-attn-mask-startend-row-indices",
    MASTERS: """
        amp-configs.custom-black-list amp-configs.custom-black-varnames amp-configs.custom-white-list
        amp-configs.use-fp16-guard amp-configs.use-optimizer-fp16 amp-custom-black-list amp-custom-white-list
        amp-master-grad sharding-configs.optimize-cast input-layernorm-in-fp32 no-use-gmm-fp8
    """,
    f"{ROUTER}::test_computes_in_fp32_at_least": "router-gating-in-fp32",
    SCALE: "amp-configs.decr-ratio amp-configs.use-dynamic-loss-scaling",
    LOSS: """
        loss-subbatch-seqlen loss-subbatch-sequence-length replace-with-parallel-cross-entropy tensor-parallel-output
        replace-with-c-embedding use-fused-head-and-loss-fn use-fused-head-loss-fn use-fused-linear-cross-entropy
        use-sparse-head-and-loss-fn loss-chunk-size loss-compute-mode mtp-mem-efficient-logits output-layer-slice-num
    """,
    LAYOUTS: """
        dp-allreduce-avg-in-gradinent-scale sp-allreduce-avg-in-gradinent-scale enable-delay-scale-loss
        gradient-merge-configs.avg gradient-scale-configs.scale-gradient gradient-scale-configs.scale-strategy
        gradient-sync-after-accumulate hybrid-configs.mp-configs.sync-grad hybrid-configs.mp-configs.sync-moment
        hybrid-configs.mp-configs.sync-param hybrid-configs.pp-configs.delay-scale-loss stage1-reduce-avg sync-grad
        hybrid-configs.sharding-configs.use-reduce-avg pp-delay-scale-loss pp-sync-moment pp-sync-param pipeline
        sharding tensor-parallel tensor-parallel-configs.tensor-parallel-degree tp-sync-moment tp-sync-param
        use-expert-parallel auto-parallel-sync-shared-params sharding-configs.use-calc-stream use-sp-callback
        split-inputs-sequence-dim enable-mtp-magic-send enable-recompute-layers-per-pp-rank use-mc2
        enable-token-rearrange-opt moe-permutation-async-comm moe-token-dispatcher-type use-cp-send-recv-overlap
        use-fused-ring-attention-update moe-hierarchical-alltoallv moe-zerc
    """,
}
# What touches no number of a training, whatever it says.
SILENT_FLAGS = """
    --data-path --split --tokenizer-model --eval-interval --log-interval --deterministic --save --keep --async-save
    --load-hf --dtype --seed --no-use-flash-attn
"""
SILENT = """
    auto-parallel-resume-form-hybrid-parallel distributed-dataloader do-train evaluation-strategy
    flex-ckpt-comm-method force-reshard-pp from-scratch load-checkpoint-format load-sharded-model
    load-sharded-model-remap-parameter-name log-global-grad-norm logging-strategy pp-need-data pp-need-data-degree
    save-checkpoint-format save-rng-states save-sharded-model save-strategy unified-checkpoint
    unified-checkpoint-config use-intermediate-api ckpt-format local-rank no-use-rts tokenizer-type
"""


def answers(tables: Iterable[str], framework: str) -> Iterator[tuple[str, Translated]]:
    """Every argument with what becomes of its values."""
    for table in tables:
        for row in declared(table):
            for value in ("true", "false", "2", "0.5", *values_of(row)):
                yield row.name, translate(row.words(value), framework)[0]


@pytest.mark.parametrize(("tables", "framework"), [(OF_PADDLE, "paddle"), (OF_MINDSPEED, "mindspeed")])
def test_what_is_the_same_here_is_held_to_a_formula(tables: tuple[str, ...], framework: str) -> None:
    known = {*SILENT.split(), *(name for names in IMPLICATIONS.values() for name in names.split())}
    written = {word for line in LINES.values() for word in ours(line) if word.startswith("--")}
    missing = {}
    for name, item in answers(tables, framework):
        if item.verdict == IMPLIED and name not in known:
            missing[name] = item.reason
        for word in shlex.split(item.ours) if item.verdict in (SAME, RENAMED) else []:
            flag = spellings().get(normal(word[2:])) if word.startswith("--") else None
            touches = flag is not None and flag.flag.group in ("model", "moe", "training", "optimizer", "data")
            if touches and word not in written and word not in FLAGS and word not in SILENT_FLAGS.split():
                missing[name] = item.ours
    assert missing == {}


def test_no_argument_is_excused_that_needs_no_excuse() -> None:
    implied = {name for name, item in answers(OF_PADDLE, "paddle") if item.verdict == IMPLIED}
    implied |= {name for name, item in answers(OF_MINDSPEED, "mindspeed") if item.verdict == IMPLIED}
    assert {*SILENT.split(), *(name for names in IMPLICATIONS.values() for name in names.split())} - implied == set()


def test_the_tests_that_are_named_are_there() -> None:
    for place in {*FLAGS.values(), *IMPLICATIONS}:
        path, _, name = place.partition("::")
        assert (ROOT / path).is_file(), place
        assert name in names_of_tests(path), place
