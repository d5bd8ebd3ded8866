"""Translated lines of Megatron-LM train as its formulas say: losses, norms and weights of two steps, in fp64.

``NUMBERS`` says for every argument that is the same here, renamed or implied and touches numbers where that is held.
"""

from __future__ import annotations

import ast
import math
import os
import random
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megapar.arguments import parse
from megapar.config.read import normal, spellings
from megapar.core.optimizer.loss_scale import LossScale
from megapar.core.random import Streams
from megapar.data.sampling.samples import Boundaries, DecoderSamples
from megapar.tools.translation.translated import equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import CHANGING, IMPLIED, RENAMED, SAME
from megapar.training.step.schedules import BatchSize, LearningRate
from tests.support.ranks import run_ranks
from tests.tools.translation.megatron_model import Adam, Sgd, loss, norm
from tests.tools.translation.tables import declared

ROOT = Path(__file__).parents[3]
USUAL = "--seq-length 16 --max-position-embeddings 24 --micro-batch-size 2 --global-batch-size 4 --mock-data --seed 7"
DRY = "--attention-dropout 0 --hidden-dropout 0"
# As scripts write them; all else is Megatron's default.
LINES = {
    "gpt": f"{USUAL} {DRY} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 100 --lr 0.01"
    " --train-iters 9 --init-method-std 0.1 --no-bias-gelu-fusion --transformer-impl local --calculate-per-token-loss",
    "llama": f"{USUAL} {DRY} --num-layers 2 --hidden-size 96 --num-attention-heads 4 --vocab-size 128 --lr 0.02"
    " --train-iters 9 --lr-decay-iters 5 --lr-decay-style cosine --min-lr 0.004 --normalization RMSNorm --swiglu"
    " --norm-epsilon 1e-3 --position-embedding-type rope --rotary-base 200000 --disable-bias-linear"
    " --group-query-attention --num-query-groups 2 --kv-channels 16 --untie-embeddings-and-output-weights"
    " --adam-beta1 0.8 --adam-beta2 0.9"
    " --adam-eps 1e-3 --weight-decay 0.3 --clip-grad 0.2 --init-method-std 0.05 --rotary-percent 0.5"
    " --use-rope-scaling --rope-scaling-factor 4"
    " --optimizer adam --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --use-flash-attn",
    "experts": f"{USUAL} {DRY} --num-layers 3 --hidden-size 32 --num-attention-heads 4 --vocab-size 128 --lr 0.01"
    " --train-iters 9 --lr-decay-style constant --normalization RMSNorm --swiglu --disable-bias-linear"
    " --use-rotary-position-embeddings --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24"
    " --moe-layer-freq ([0]*1+[1]*2) --ffn-hidden-size 48 --moe-shared-expert-intermediate-size 48"
    " --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss --moe-grouped-gemm"
    " --moe-token-dispatcher-type alltoall --moe-router-dtype fp32 --init-method-std 0.1 --moe-shared-expert-overlap",
    "sigmoid": f"{USUAL} {DRY} --encoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 128"
    " --lr 0.01 --train-iters 9 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
    " --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid"
    " --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"
    " --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.2 --moe-router-pre-softmax"
    " --init-method-std 0.1 --moe-permute-fusion --weight-decay-incr-style constant --moe-aux-loss-coeff 0.1",
    "per sample": f"{USUAL} {DRY} --num-layers 1 --hidden-size 32 --num-attention-heads 4 --vocab-size 128 --lr 0.01"
    " --train-iters 9 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
    " --num-experts 8 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.2"
    " --init-method-std 0.1 --moe-shared-expert-intermediate-size 24",
    "sgd": f"{USUAL} {DRY} --num-layers 1 --hidden-size 32 --num-attention-heads 4 --vocab-size 128 --lr 0.5"
    " --train-iters 9 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
    " --init-method-std 0.1 --optimizer sgd --sgd-momentum 0.8 --weight-decay 0.3 --clip-grad 0.7 --adam-beta1 0.5",
}


HERE = "tests/tools/translation/test_megatron_numbers.py"
STEPS = f"{HERE}::test_two_steps_are_megatron_s"
MASTERS = f"{HERE}::test_masters_gradients_and_moments_are_fp32"
GATES = "tests/moe/test_deepspeed_gates.py"
TOKEN_GATE = "tests/model/layers/test_mlp.py::test_output_and_gradients_are_those_of_qwen2_moe_s_formula"
AHEAD = "tests/model/decoder/test_mtp_layer.py::test_the_published_block_by_its_formula"
LOSS = "tests/model/layers/test_loss.py::test_equals_the_reference"
ROPE = "tests/model/layers/test_rotary.py::test_frequencies_are_those_of_transformers"
LAYOUTS = "tests/equivalence/test_equivalence.py::test_fp64"
# Flags that no line has: where the formula is held.
FLAGS = {
    "--lr-warmup-iters": f"{HERE}::test_the_learning_rate_behind_the_warm_up_is_megatron_s",
    "--lr-wsd-decay-iters": f"{HERE}::test_the_learning_rate_behind_the_warm_up_is_megatron_s",
    "--lr-wsd-decay-style": f"{HERE}::test_the_learning_rate_behind_the_warm_up_is_megatron_s",
    "--initial-loss-scale": f"{HERE}::test_the_loss_scale_moves_as_megatron_s",
    "--min-loss-scale": f"{HERE}::test_the_loss_scale_moves_as_megatron_s",
    "--loss-scale-window": f"{HERE}::test_the_loss_scale_moves_as_megatron_s",
    "--hysteresis": f"{HERE}::test_the_loss_scale_moves_as_megatron_s",
    "--rampup-batch-size": f"{HERE}::test_the_batch_ramps_as_megatron_s",
    "--reset-position-ids": f"{HERE}::test_documents_are_parted_as_megatron_s",
    "--reset-attention-mask": f"{HERE}::test_documents_are_parted_as_megatron_s",
    "--eod-mask-loss": f"{HERE}::test_documents_are_parted_as_megatron_s",
    "--mtp-loss-weight": "tests/model/decoder/test_mtp.py::test_loss_by_hand",
    **dict.fromkeys(("--mtp-depth", "--mtp-block"), AHEAD),
    **dict.fromkeys(("--original-max-position-embeddings", "--low-freq-factor", "--high-freq-factor"), ROPE),
    **dict.fromkeys(("--beta-fast", "--beta-slow", "--mscale", "--mscale-all-dim", "--rope-attention-factor"), ROPE),
    "--moe-router-pre-softmax": "tests/model/conformance/test_conformance.py::test_conformance",
    "--multi-latent-attention": "tests/model/conformance/test_conformance.py::test_conformance",
    "--moe-layer-freq": "tests/model/test_layer_pattern.py::test_lists_are_those_of_python",
    "--moe-shared-expert-intermediate-size": TOKEN_GATE,
    "--moe-shared-expert-gate": TOKEN_GATE,
    "--qk-norm": "tests/model/hugging_face/test_save.py::test_exported_decoder_gives_our_logits",
    "--moe-model-type": f"{GATES}::test_kept_pairs_and_weights",
    "--moe-capacity-factor": f"{GATES}::test_capacity_counts_and_loss",
    "--moe-min-capacity": f"{GATES}::test_capacity_counts_and_loss",
    "--moe-drop-policy": f"{GATES}::test_kept_pairs_and_weights",
    "--depth-scaled-init": "tests/model/test_initialize.py::test_depth_scales_what_is_added_to_the_residual_stream",
}
IMPLICATIONS = {
    **dict.fromkeys(("add-qkv-bias", "rope-type", "softmax-type", "mlp-type", "rotary-interleaved"), STEPS),
    **dict.fromkeys(("no-rope-fusion", "torch_adam", "ds_fused_adam", "attention-backend"), STEPS),
    **dict.fromkeys((f"use-flash-attn-{kind}" for kind in ("v1", "v2", "triton", "builder")), STEPS),
    **dict.fromkeys(("no-pad-vocab-size", "disable-pad-vocab-size"), STEPS),
    **dict.fromkeys(("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"), MASTERS),
    **dict.fromkeys((f"megatron-fsdp-{kind}-dtype" for kind in ("main-params", "main-grads", "grad-comm")), MASTERS),
    **dict.fromkeys(("ddp-param-name-patterns-for-fp32-local-accumulation", "use-precision-aware-optimizer"), MASTERS),
    **dict.fromkeys(("cross-entropy-fusion-impl", "cross-entropy-loss-fusion"), LOSS),
    "dataloader-type": "tests/data/sampling/test_samples.py::test_every_epoch_has_every_window_once_in_its_own_order",
    "disable-moe-top2-2nd-expert-sampling": f"{GATES}::test_kept_pairs_and_weights",
    **dict.fromkeys(("enable-expert-tensor-parallelism", "enable-zbh1-exact-semantics"), LAYOUTS),
    **dict.fromkeys(("create-moe-param-group", "overlap-p2p-communication"), LAYOUTS),
    **dict.fromkeys(("moe-enable-deepep", "moe-flex-dispatcher-backend"), LAYOUTS),
}
# What touches no number of a training, whatever it says.
SILENT_FLAGS = {
    "--data-path": "which text is read",
    "--eval-data-path": "which text is read",
    "--split": "which text is read",
    "--tokenizer-model": "what tokens are",
    "--eval-interval": "evaluations change nothing",
    "--eval-iters": "evaluations change nothing",
    "--manual-gc": "when Python collects",
    "--manual-gc-interval": "when Python collects",
    "--deterministic": "which kernels repeat their results",
    "--dtype": "the comparison is in fp64",
}
SILENT = (
    *("auto-detect-ckpt-format", "ckpt-format", "dist-ckpt-format", "use-dist-ckpt", "exit-on-missing-checkpoint"),
    *("check-for-large-grads", "check-for-spiky-loss", "log-straggler", "log-throughput", "distributed-backend"),
    *("exit-signal-handler", "exit-signal-handler-for-dataloader", "exit-signal-handler-for-training", "local-rank"),
    *("log-memory-to-tensorboard", "log-timers-to-tensorboard", "log-world-size-to-tensorboard", "local_rank"),
    *("log-batch-size-to-tensorboard", "no-log-learnig-rate-to-tensorboard", "no-log-loss-scale-to-tensorboard"),
    *("disable-use-tokenizer-model-from-checkpoint-args", "no-use-tokenizer-model-from-checkpoint-args", "onnx-safe"),
    *("tokenizer-type", "data-impl"),
)


def given(line: str) -> dict[str, str]:
    """A script's arguments by name."""
    found: dict[str, str] = {}
    for word in line.split():
        if word.startswith("--"):
            last = word[2:]
            found[last] = ""
        else:
            found[last] = f"{found[last]} {word}".strip()
    if "encoder-num-layers" in found:
        found["num-layers"] = found["encoder-num-layers"]
    if "use-rotary-position-embeddings" in found:
        found["position-embedding-type"] = "rope"
    return found


def ours(line: str) -> list[str]:
    """The command that a line is translated to, in fp64; nothing of it may be another training."""
    items = translate(line.split(), "megatron")
    items += implicit_defaults(items, "megatron")
    assert [item for item in items if item.verdict in CHANGING] == []
    flags = [word for text in equivalent(items)[1] for word in shlex.split(text)]
    return [*flags, "--dtype", "fp64", "--device", "cpu"]


def two_steps(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> dict[str, Any]:
    """What a run has before, and after each of two steps."""
    from datetime import timedelta

    from megapar.core.comm.world import World
    from megapar.core.device.pick import pick
    from megapar.trainer import Trainer
    from megapar.training.building.corpus import make_corpus

    with patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}):
        config = parse("moe", flags, dict(os.environ))
        corpus = make_corpus(config)
        world = World.start(
            config.grid,
            pick("cpu", 0),
            timedelta(minutes=config.parallel.distributed_timeout_minutes),
            f"file://{rendezvous}",
        )
        trainer = Trainer(config, world, corpus)
        trainer.start()

    def state() -> dict[str, np.ndarray]:
        model = trainer.job.model
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.detach().double().numpy().copy() for name, tensor in named}

    states, steps, shards = [state()], [], trainer.job.sharding.master_shards
    for _ in range(2):
        steps.append(trainer.step())
        states.append(state())
    samples = [corpus.train[i] for i in range(8)]
    optimizer = trainer.job.optimizer
    kept = [tensor for shard in shards for tensor in (shard.master, shard.grad)]
    kept += [tensor for name in optimizer.states for tensor in optimizer.state(name)]
    trainer.loader.close()
    world.close()
    return {
        "dtypes": {str(tensor.dtype) for tensor in kept if tensor is not None},
        "states": states,
        "norms": [step.norm for step in steps],
        "tokens": np.stack([sample["tokens"] for sample in samples]),
        "labels": np.stack([sample["labels"] for sample in samples]),
    }


@pytest.mark.parametrize("name", LINES)
def test_two_steps_are_megatron_s(name: str) -> None:
    """Two micro-batches a step: weights and norms after the first and the second step."""
    arguments = given(LINES[name])
    run = run_ranks(1, two_steps, ours(LINES[name]), group=False)[0]
    weights = {key: torch.from_numpy(value.copy()) for key, value in run["states"][0].items()}
    trained = [key for key in weights if not key.endswith("correction_bias")]
    optimizer = Sgd(arguments) if arguments.get("optimizer") == "sgd" else Adam(arguments)
    for step in range(2):
        for key in trained:
            weights[key].requires_grad_(True).grad = None
        loads: dict[str, torch.Tensor] = {}
        for first in (4 * step, 4 * step + 2):
            tokens, labels = (torch.from_numpy(run[kind][first : first + 2]) for kind in ("tokens", "labels"))
            value, balance = loss(weights, tokens, labels, arguments)
            (value / 2).backward()
            loads = {key: loads.get(key, 0) + load for key, load in balance.load.items()}
        gradients = {key: weights[key].grad for key in trained}
        weights = {key: tensor.detach() for key, tensor in weights.items()}
        total = optimizer.step(weights, gradients)  # type: ignore[arg-type]
        if "moe-router-enable-expert-bias" in arguments:
            for key, load in loads.items():
                speed = float(arguments["moe-router-bias-update-rate"])
                weights[f"{key}.router.correction_bias"] += speed * torch.sign(load.mean() - load)
        assert run["norms"][step] == pytest.approx(total, rel=1e-9)
        for key, value in run["states"][step + 1].items():
            np.testing.assert_allclose(value, weights[key].numpy(), rtol=1e-9, atol=1e-11, err_msg=key)


def test_masters_gradients_and_moments_are_fp32() -> None:
    run = run_ranks(1, two_steps, [*ours(LINES["gpt"]), "--dtype", "bf16"], group=False)[0]
    assert run["dtypes"] == {"torch.float32"}


def test_the_lines_start_and_are_of_the_sizes_that_megatron_makes() -> None:
    config = parse("moe", ours(LINES["llama"]), {})
    assert config.model.ffn_hidden_size == int((4 * 96 * 2 / 3) / 64) * 64
    config = parse("moe", ours(LINES["gpt"]), {})
    assert (config.model.ffn_hidden_size, config.model.vocab_size) == (4 * 32, 128)
    assert config.optimizer.adam_beta2 == 0.999


def scheduled(step: int, peak: float, floor: float, style: str, warmup: int, end: int, last: int, shape: str) -> float:
    """Megatron's OptimizerParamScheduler, steps as iterations."""
    if warmup > 0 and step <= warmup:
        return peak * step / warmup
    if style == "constant":
        return peak
    if step > end:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
    share = (step - warmup) / (end - warmup)
    if style == "WSD":
        share = max(0.0, (step - (end - last)) / last)
    left = {
        "linear": 1 - share,
        "cosine": 0.5 * (math.cos(math.pi * share) + 1),
        "exponential": 2 * 0.5**share - 1,
        "minus_sqrt": 1 - math.sqrt(share),
    }
    return floor + left[shape if style == "WSD" else style] * (peak - floor)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_the_learning_rate_behind_the_warm_up_is_megatron_s(style: str, warmup: int) -> None:
    """In the warm-up ours is one step ahead, as the row of --lr-warmup-iters says."""
    shapes = ["linear", "cosine", "exponential", "minus_sqrt"] if style == "WSD" else [""]
    for shape in shapes:
        item = translate(["--lr-decay-style", style, "--lr-wsd-decay-style", shape or "linear"], "megatron")[0]
        kind = item.ours.removeprefix("--lr-decay-style ")
        rate = LearningRate(3.0, 0.5, kind, warmup, 40, 10, shape or "linear")
        theirs = [scheduled(step, 3.0, 0.5, style, warmup, 40, 10, shape) for step in range(60)]
        assert [rate.at(step) for step in range(warmup, 60)] == pytest.approx(theirs[warmup:], rel=1e-12)
        assert [rate.at(step) for step in range(warmup)] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)
    if warmup:
        assert "(i + 1)" in translate(["--lr-warmup-iters", "7"], "megatron")[0].reason


def test_the_loss_scale_moves_as_megatron_s() -> None:
    value, good, chances = 2.0**16, 0, 2
    ours = LossScale(2.0**16, minimum=1.0, factor=2.0, window=5, hysteresis=2)
    draw = random.Random(3)
    for _ in range(500):
        overflow = draw.random() < 0.2
        if overflow:
            good, chances = 0, chances - 1
            value = max(value * 0.5, 1.0) if chances <= 0 else value
        else:
            good += 1
            if good == 5:
                value, good, chances = value * 2.0, 0, 2
        ours.update(overflow=overflow)
        assert ours.value == value


def test_the_batch_ramps_as_megatron_s() -> None:
    for start, increment, ramp, final in ((16, 8, 300, 64), (2, 2, 96, 8)):
        ours = BatchSize(final, start, increment, ramp)
        per_increment = ramp / ((final - start) // increment)
        for consumed in range(0, 2 * ramp, 7):
            theirs = final if consumed > ramp else start + int(consumed / per_increment) * increment
            assert ours.at(consumed) == min(final, theirs)


def test_documents_are_parted_as_megatron_s() -> None:
    """Its get_ltor_masks_and_position_ids: loss mask, positions and attention from the end tokens of a sample."""
    ids = np.array([5, 6, 0, 7, 8, 9, 0, 0, 3, 4, 2, 0, 6])
    tokens = ids[:-1]
    sample = DecoderSamples([ids], 12, None, Boundaries(0, True, True, True))[0]  # type: ignore[arg-type]
    positions, seen = np.arange(12), np.tril(np.ones((12, 12), dtype=bool))
    begun = 0
    for end in np.flatnonzero(tokens == 0):
        seen[end + 1 :, : end + 1] = False
        positions[end + 1 :] -= end + 1 - begun
        begun = end + 1
    documents = np.searchsorted(sample["ends"], np.arange(12), side="right")
    assert (sample["positions"] == positions).all()
    assert ((documents[:, None] == documents) & np.tril(np.ones((12, 12), dtype=bool)) == seen).all()
    assert ((sample["labels"] >= 0) == (tokens != 0)).all()


def test_a_norm_of_one_plus_w_takes_the_same_step() -> None:
    """--apply-layernorm-1p keeps w of 1 + w; without decay on norms the step is the same."""
    weights = {"norm.weight": torch.ones(4, dtype=torch.float64), "norm.bias": torch.zeros(4, dtype=torch.float64)}
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centred = {"norm.weight": weights["norm.weight"] - 1}
    plain, shifted = Adam({"lr": "0.1", "train-iters": "4"}), Adam({"lr": "0.1", "train-iters": "4"})
    for _ in range(2):
        leaf = weights["norm.weight"].clone().requires_grad_(True)
        (norm(x, {**weights, "norm.weight": leaf}, "norm", {}) * x.roll(1)).sum().backward()
        assert leaf.grad is not None
        plain.step({"norm.weight": weights["norm.weight"]}, {"norm.weight": leaf.grad})
        shifted.step(centred, {"norm.weight": leaf.grad})
        torch.testing.assert_close(weights["norm.weight"], 1 + centred["norm.weight"], rtol=0, atol=1e-15)


def test_scores_divided_by_the_layer_s_number_and_multiplied_again_are_the_same() -> None:
    """--apply-query-key-layer-scaling is about the range of fp16."""
    scores = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((3 * (scores / 3)).softmax(-1), scores.softmax(-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_is_of_so_many_and_scales_the_rest(share: float) -> None:
    x = torch.ones(40_000, dtype=torch.float64)
    y = Streams(7).dropout(x, share, "embedding")
    dropped = int((y == 0).sum())
    assert abs(dropped - share * len(x)) < 5 * math.sqrt(len(x) * share * (1 - share))
    torch.testing.assert_close(y[y != 0], x[y != 0] / (1 - share), rtol=1e-12, atol=0)


@cache
def names_of_tests(path: str) -> frozenset[str]:
    """The names of a file's tests."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("table", "framework"), [("megatron_lm", "megatron"), ("megatron_deepspeed", "deepspeed")])
def test_what_is_the_same_here_is_held_to_a_formula(table: str, framework: str) -> None:
    in_lines = {name for line in LINES.values() for name in given(line)}
    known = {*in_lines, *IMPLICATIONS, *SILENT}
    written = {word for line in LINES.values() for word in ours(line) if word.startswith("--")}
    missing = {}
    for row in declared(table):
        values = dict.fromkeys((row.default, *row.choices, "2", "1")) if row.kind == "value" else [""]
        for value in values:
            item = translate(row.words(value), framework)[0]
            if item.verdict == IMPLIED and row.name not in known:
                missing[row.name] = item.reason
            for word in shlex.split(item.ours) if item.verdict in (SAME, RENAMED) else []:
                flag = spellings().get(normal(word[2:])) if word.startswith("--") else None
                touches = flag is not None and flag.flag.group in ("model", "moe", "training", "optimizer", "data")
                if touches and word not in written and word not in FLAGS and word not in SILENT_FLAGS:
                    missing[row.name] = item.ours
    assert missing == {}


def test_the_tests_that_are_named_are_there() -> None:
    for place in {*FLAGS.values(), *IMPLICATIONS.values()}:
        path, _, name = place.partition("::")
        assert (ROOT / path).is_file(), place
        assert not name or name in names_of_tests(path), place
