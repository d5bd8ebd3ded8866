"""Translated lines of Megatron-LM train as its formulas say: losses, norms and weights of two steps, in fp64.

test_numbers.py has those of Paddle and MindSpeed; test_number_coverage.py says which test each argument has.
"""

from __future__ import annotations

import math
import os
import random
import shlex
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megapar.arguments import parse
from megapar.core.optimizer.loss_scale import LossScale
from megapar.core.random import Streams
from megapar.data.sampling.samples import Boundaries, DecoderSamples
from megapar.schema.batch_size import BatchSize
from megapar.tools.translation.translated import equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import CHANGING
from megapar.training.step.schedules import LearningRate
from tests.support.ranks import run_ranks
from tests.tools.translation.megatron_model import Adam, Sgd, loss, scheduled

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


def ours(line: str, framework: str = "megatron") -> list[str]:
    """The command that a line is translated to, in fp64; nothing of it may be another training."""
    items = translate(shlex.split(line), framework)
    items += implicit_defaults(items, framework)
    assert [item for item in items if item.verdict in CHANGING] == []
    flags = [word for text in equivalent(items)[1] for word in shlex.split(text)]
    return [*flags, "--data-path", "mock", "--dtype", "fp64", "--device", "cpu"]


def two_steps(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> dict[str, Any]:
    """What a run has before, and after each of two steps."""
    from datetime import timedelta

    from megapar.core.comm.world import World
    from megapar.core.device.accelerators import pick
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


def hold_two_steps(
    flags: Sequence[str], arguments: dict[str, str], more: Callable[..., torch.Tensor | float] = lambda *_: 0.0
) -> dict[str, Any]:
    """Run two steps of two micro-batches each, and compare norms and weights with the formulas of the arguments.

    Args:
        flags: the run's, which is returned.
        arguments: of the formulas, as Megatron spells them.
        more: losses besides Megatron's, of the weights and the layers that have experts.
    """
    run: dict[str, Any] = run_ranks(1, two_steps, flags, group=False)[0]
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
            ((value + more(weights, balance.load)) / 2).backward()
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
    return run


@pytest.mark.parametrize("name", LINES)
def test_two_steps_are_megatron_s(name: str) -> None:
    hold_two_steps(ours(LINES[name]), given(LINES[name]))


def test_masters_gradients_and_moments_are_fp32() -> None:
    run = run_ranks(1, two_steps, [*ours(LINES["gpt"]), "--dtype", "bf16"], group=False)[0]
    assert run["dtypes"] == {"torch.float32"}


def test_the_lines_start_and_are_of_the_sizes_that_megatron_makes() -> None:
    config = parse("moe", ours(LINES["llama"]), {})
    assert config.model.ffn_hidden_size == int((4 * 96 * 2 / 3) / 64) * 64
    config = parse("moe", ours(LINES["gpt"]), {})
    assert (config.model.ffn_hidden_size, config.model.vocab_size) == (4 * 32, 128)
    assert config.optimizer.adam_beta2 == 0.999


# How a line asks for the rate, and the style and shape of Megatron's formula, of which Paddle's are special cases:
# PaddleNLP's (Linear|Cosine)AnnealingWithWarmupDecay and ERNIE 4.5's wsd.
RATES = [
    *(("megatron", f"--lr-decay-style {style}", style, "") for style in ("constant", "linear", "cosine")),
    ("megatron", "--lr-decay-style inverse-square-root", "inverse-square-root", ""),
    *(
        ("megatron", f"--lr-decay-style WSD --lr-wsd-decay-style {shape} --lr-wsd-decay-iters 10", "WSD", shape)
        for shape in ("linear", "cosine", "exponential", "minus_sqrt")
    ),
    *(("paddle", f"--lr_scheduler_type {style}", style, "") for style in ("constant", "linear", "cosine")),
    ("paddle", "--lr_scheduler wsd:30 --decay_function 1-sqrt --max_steps 40", "WSD", "minus_sqrt"),
]


@pytest.mark.parametrize(("framework", "line", "style", "shape"), RATES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_the_learning_rate_behind_the_warm_up_is_theirs(
    framework: str, line: str, style: str, shape: str, warmup: int
) -> None:
    """In the warm-up ours is one step ahead, as the rows of --lr-warmup-iters and --warmup_steps say."""
    written = " ".join(item.ours for item in translate(line.split(), framework)).split()
    words = dict(zip(written[::2], written[1::2], strict=True))
    last, ours = int(words.get("--lr-wsd-decay-iters", 0)), words.get("--lr-wsd-decay-style", "linear")
    rate = LearningRate(3.0, 0.5, words["--lr-decay-style"], warmup, 40, last, ours)
    end = 60 if framework == "megatron" else 40
    theirs = [scheduled(step, 3.0, 0.5, style, warmup, 40, 10, shape) for step in range(end)]
    assert [rate.at(step) for step in range(warmup, end)] == pytest.approx(theirs[warmup:], rel=1e-12)
    assert [rate.at(step) for step in range(warmup)] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)


def test_the_step_of_a_warm_up_is_said() -> None:
    assert "i / 7 of the rate, (i - 1) / 7 in" in translate(["--lr-warmup-iters", "7"], "megatron")[0].reason
    assert "one step ahead" in translate(["--warmup_steps", "7"], "paddle")[0].reason


@pytest.mark.parametrize(
    ("start", "window", "hysteresis", "steps", "overflows"),
    [(2.0**16, 5, 2, 500, 0.2), (2.0**15, 2000, 1, 60_000, 3e-4)],
    ids=["Megatron-LM", "Paddle"],
)
def test_the_loss_scale_moves_as_theirs(
    start: float, window: int, hysteresis: int, steps: int, overflows: float
) -> None:
    """Paddle's GradScaler has 2000 good steps in a row, and decr_every_n_nan_or_inf 1."""
    value, good, chances = start, 0, hysteresis
    ours = LossScale(start, minimum=1.0, factor=2.0, window=window, hysteresis=hysteresis)
    draw = random.Random(3)
    for _ in range(steps):
        overflow = draw.random() < overflows
        if overflow:
            good, chances = 0, chances - 1
            value = max(value * 0.5, 1.0) if chances <= 0 else value
        else:
            good += 1
            if good == window:
                value, good, chances = value * 2.0, 0, hysteresis
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


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_is_of_so_many_and_scales_the_rest(share: float) -> None:
    x = torch.ones(40_000, dtype=torch.float64)
    y = Streams(7).dropout(x, share, "embedding")
    dropped = int((y == 0).sum())
    assert abs(dropped - share * len(x)) < 5 * math.sqrt(len(x) * share * (1 - share))
    torch.testing.assert_close(y[y != 0], x[y != 0] / (1 - share), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("tokens", "steps"), [(1000, 72), (994, 71)])
def test_tokens_end_a_run_after_the_step_that_reaches_them(tokens: int, steps: int) -> None:
    line = f"--train-tokens {tokens} --global-batch-size 2 --seq-length 7"
    assert translate(line.split(), "deepspeed")[0].ours == f"--train-iters {steps}"
