"""Formulas against the real trainer: on fake tensors as any rank, and on real ones with every live byte counted."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from _pytest.mark import ParameterSet

from megapar.arguments import Config, parse
from megapar.core.comm.world import World
from megapar.core.device import kinds
from megapar.core.device.accelerators import pick
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.data.batches import Collate
from megapar.data.corpus import Corpus
from megapar.planning.devices import device_kind
from megapar.planning.memory import UNCOUNTED_SHARE
from megapar.planning.plan import Plan
from megapar.tools.main import main
from megapar.tools.tracing.pretend import pretend
from megapar.tools.tracing.trace import TracedStep, measure, trace, traceable
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus
from megapar.training.building.parts import Parts
from tests.support.ranks import run_ranks

# peak, the plan's peak, bytes sent, the plan's bytes sent, the most by which the plan's peak may be above
Found = tuple[int, int, dict[str, int], dict[str, float], float]
# With communication buffers that a CPU keeps, which a plan bounds; at stage 3, which keeps none; without either.
KEPT, STAGE_THREE, EXACT = 1.15, 1.05, 1.02

MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 4096 --micro-batch-size 4
    --device cpu --data-path mock
"""
DENSE = "moe --num-query-groups 2 --num-experts 0"
GPT = (
    "moe --num-experts 0 --normalization layernorm --position-embedding-type learned --activation gelu"
    " --add-bias-linear --untie-embeddings-and-output-weights"
)
ERNIE = "ernie --attention-dropout 0 --hidden-dropout 0"
EVEN = "moe --num-experts 8 --moe-model-type deepspeed_moe --num-query-groups 2"
ROUTED = "moe --num-experts 8 --moe-shared-experts 1 --num-query-groups 2"
ERNIE3 = (
    f"{ERNIE} --ernie-model ernie3 --task-num-layers 2 --task-hidden-size 64 --task-num-attention-heads 4"
    " --task-ffn-hidden-size 256 --type-vocab-size 4 --task-type-vocab-size 5 --generation-segments 2"
    " --memory-length 32 --micro-batch-size 6"
)
OLMO2 = f"{DENSE} --qk-norm --qk-norm-scope width --norm-placement output"
MULTIPLIED = "--embedding-multiplier 12 --residual-multiplier 0.22 --softmax-scale 0.1 --logits-scaling 8"
SEQUENCE = "--mp-degree 2 --sequence-parallel"
# Lengths at which a balanced load has whole numbers of rows.
BY_NODE = "--ep-degree 4 --moe-dispatch node --seq-length 192 --num-experts 4 --ranks-per-node"
LAYER_AHEAD = f"{ROUTED} --mtp-depth 1 --mtp-block layer"
ODD = f"{GPT} --mp-degree 2 --vocab-size 31 --hidden-size 128 --micro-batch-size 1"
PIPELINE = "--pp-degree 4 --gradient-merge-acc-step 8 --num-layers 8"
TWO_BYTES = {
    "gradients": "--main-grads-dtype bf16",
    "moments": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "remainders": "--store-param-remainders",
}

# (rank, ranks, model and flags), in bf16 but for the last
TRACED: dict[str, tuple[int, int, str]] = {
    "sharding 8": (3, 8, DENSE),
    "mp 2, sequence": (5, 8, f"{DENSE} {SEQUENCE}"),
    "OLMo 2": (0, 1, OLMO2),
    "OLMo 2, mp 2": (1, 2, f"{OLMO2} --mp-degree 2"),
    "OLMo 2, mp 2, sequence, multipliers": (1, 2, f"{OLMO2} {MULTIPLIED} {SEQUENCE}"),
    "first stage": (0, 4, f"{DENSE} {PIPELINE}"),
    "third stage": (2, 4, f"{DENSE} {PIPELINE}"),
    "recompute": (0, 1, f"{DENSE} --recompute-interval 1 --num-layers 8"),
    "dropout": (1, 2, f"{DENSE} --attention-dropout 0.1 --hidden-dropout 0.1 --mp-degree 2"),
    "stage 3 on one rank": (0, 1, f"{DENSE} --sharding-stage 3"),
    "ep 8": (3, 8, f"{ROUTED} --ep-degree 8"),
    "ep 2, emp 2": (1, 4, f"{ROUTED} --ep-degree 2 {SEQUENCE}"),
    "by node": (3, 4, f"{ROUTED} {BY_NODE} 2"),
    "by node, emp 2": (5, 8, f"{ROUTED} {BY_NODE} 4 --mp-degree 2"),
    "by node, emp 2, sequence": (5, 8, f"{ROUTED} {BY_NODE} 4 {SEQUENCE}"),
    "by node, two slices": (2, 4, f"{ROUTED} {BY_NODE} 2 --ampipe-degree 2"),
    "by node, pieces": (
        0,
        4,
        f"{EVEN} {BY_NODE} 2 --num-experts 8 --seq-length 224 --use-pipe-experts --pipe-experts-multi-data 2",
    ),
    "gated shared experts": (1, 4, f"{ROUTED} --moe-shared-expert-gate --ep-degree 2 {SEQUENCE}"),
    "a layer ahead, ep 2, emp 2": (1, 4, f"{LAYER_AHEAD} --ep-degree 2 {SEQUENCE}"),
    "a layer ahead, last stage": (3, 4, f"{LAYER_AHEAD} {PIPELINE}"),
    "a block ahead, last stage": (3, 4, f"{DENSE} --mtp-depth 1 {PIPELINE}"),
    "ernie mp 2": (1, 4, f"{ERNIE} {SEQUENCE}"),
    "ernie3": (0, 4, ERNIE3),
    "ernie3 mp 2": (1, 4, f"{ERNIE3} {SEQUENCE}"),
    "stage 3": (3, 8, f"{DENSE} --sharding-stage 3"),
    "stage 3, whole experts": (3, 8, f"{ROUTED} --ep-degree 8 --sharding-stage 3"),
    # The ranks of a stage differ in what they send of matrices; a plan has the first one.
    "muon": (0, 8, f"{DENSE} --optimizer muon"),
    "muon, ep 2, emp 2": (0, 4, f"{ROUTED} --ep-degree 2 {SEQUENCE} --optimizer muon"),
    "two bytes": (3, 8, f"{DENSE} {' '.join(TWO_BYTES.values())}"),
    "muon, two bytes": (0, 8, f"{DENSE} --optimizer muon {' '.join(TWO_BYTES.values())}"),
    "odd vocabulary, the rank with less": (1, 4, ODD),
    "odd vocabulary, stage 3": (0, 4, f"{ODD} --sharding-stage 3"),
    "large shards": (
        1,
        16,
        f"{GPT} --dtype fp16 --vocab-size 512 --seq-length 64 --micro-batch-size 1 --hidden-size 512",
    ),
}
# The suite traces these, traces these in full, and measures these; ``-m table`` the others.
TRACED_FIRST = ("mp 2, sequence", "third stage", "ep 2, emp 2", "ernie3 mp 2", "stage 3", "odd vocabulary, stage 3")
FULL_FIRST = ("ep 2, emp 2", "stage 3")
MEASURED_FIRST = ("bf16, two micro-batches", "ernie", "sharding", "mp, sequence", "experts")
FURTHER = {"ernie3": 0.03, "ernie3 mp 2": 0.03}  # known to be further off than 2 %
# What is remembered comes again in the second layer and micro-batch: a few of them are enough.
FEW = {
    "third stage": "--num-layers 4 --gradient-merge-acc-step 4",
    "recompute": "--num-layers 3",
    "ep 2, emp 2": "--num-layers 2",
    "ernie3 mp 2": "--num-layers 2 --task-num-layers 1",
    "stage 3": "--num-layers 3",
    "stage 3, whole experts": "--num-layers 2",
}
# Few products: a CPU without instructions for bf16 takes fifty times as long for them.
NARROW = f"{DENSE} --dtype bf16 --hidden-size 128 --seq-length 128 --vocab-size 1024 --num-layers 2"
# Layers whose parameters and gradients need more than the activations.
WIDE = f"{DENSE} --hidden-size 1024 --seq-length 64 --micro-batch-size 1"
THREE = f"{DENSE} --dtype bf16 --hidden-size 512 --seq-length 32 --micro-batch-size 1 --num-layers 3 --vocab-size 1024"
# (ranks, model and flags), in fp32 but for those that say otherwise
MEASURED: dict[str, tuple[int, str]] = {
    "fp32": (1, DENSE),
    "bf16, two micro-batches": (1, f"{NARROW} --gradient-merge-acc-step 2"),
    "gpt": (1, GPT),
    "recompute": (1, f"{DENSE} --recompute-interval 2"),
    "selective": (1, f"{GPT} --recompute-granularity selective"),
    "ernie": (1, ERNIE),
    "sharding": (2, DENSE),
    "mp": (2, f"{DENSE} --mp-degree 2"),
    "mp, sequence": (2, f"{GPT} {SEQUENCE}"),
    "pp": (2, f"{GPT} --pp-degree 2 --gradient-merge-acc-step 4"),
    "experts": (2, f"{EVEN} --ep-degree 2"),
    "replicas": (2, f"{DENSE} --sharding-degree 1 --hybrid-dp"),
    "replicas of shards": (4, f"{DENSE} --sharding-degree 2 --hybrid-dp"),
    "wide": (4, WIDE),
    "wide, two micro-batches": (4, f"{WIDE} --gradient-merge-acc-step 2"),
    "wide, stage 2": (4, f"{WIDE} --sharding-stage 2 --gradient-merge-acc-step 2"),
    "wide, stage 3": (4, f"{WIDE} --sharding-stage 3"),
    "three layers, bf16": (2, THREE),
    "three layers, bf16, stage 2": (2, f"{THREE} --sharding-stage 2"),
    "three layers, bf16, stage 3": (2, f"{THREE} --sharding-stage 3"),
    "experts, stage 3": (2, f"{EVEN} --ep-degree 2 --sharding-stage 3"),
}


def parsed(dtype: str, line: str, environ: dict[str, str]) -> Config:
    """A configuration of the model; of a flag that a line has twice, the last value counts."""
    kind, *flags = line.split()
    given: dict[str, list[str]] = {}
    name = ""
    for word in ["--dtype", dtype, *MODEL.split(), *flags]:
        name = word if word.startswith("--") else name
        given[name] = [word] if word == name else [*given[name], word]
    return parse(kind, [word for words in given.values() for word in words], environ)


def with_padding(config: Config, world: World, corpus: Corpus) -> Collate:
    """Micro-batches with padding, which is computed, too: the formulas know no text, so each position counts."""
    return corpus.collate


def traced(rank: int, world_size: int, rendezvous: str, name: str) -> Found:
    pretended, ranks, line = TRACED[name]
    return compared(trace(parsed("bf16", line, {"WORLD_SIZE": str(ranks), "RANK": str(pretended)}), pretended))


def compared(seen: TracedStep) -> Found:
    plan, grid = Plan(seen.config, device_kind("cpu")), seen.config.grid
    most = EXACT if max(grid.shards, grid.expert_shards) == 1 else STAGE_THREE if plan.run.cuts_parameters else KEPT
    return seen.peak, plan.memory[seen.stage].peak, seen.sent_bytes, plan.traffic[seen.stage], most


def figures(found: TracedStep) -> dict[str, Any]:
    """What is compared of a trace; its configuration does not travel between processes."""
    return {name: getattr(found, name) for name in ("peak", "resting", "parameters", "optimizer", "sent_bytes")}


def traced_in_full(rank: int, world_size: int, rendezvous: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of a trace, and the same by torch's own fake tensors with every step run."""
    pretended, ranks, line = TRACED[name]
    config = parsed("bf16", f"{line} {FEW[name]}", {"WORLD_SIZE": str(ranks), "RANK": str(pretended)})
    tracker = MemoryTracker()
    with pretend(traceable(config, pretended), pretended, tracker, exact=True) as trainer:
        trainer.step()
        gc.collect()
        full = measure(trainer, tracker, pretended, time.perf_counter())
    return figures(trace(config, pretended)), figures(full)


def measured(rank: int, world_size: int, rendezvous: str, line: str) -> Found:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with patch.dict(os.environ, place):
        config = parsed("fp32", line, dict(os.environ))
        corpus = make_corpus(config)
        world = World.start(
            config.grid,
            pick("cpu"),
            timedelta(minutes=config.parallel.distributed_timeout_minutes),
            f"file://{rendezvous}",
        )
        with MemoryTracker() as tracker:
            trainer = Trainer(config, world, corpus, parts=Parts(collate=with_padding))
            trainer.start()
            trainer.step()
            seen = measure(trainer, tracker, rank, time.perf_counter())
            trainer.job.sharding.wait()
        trainer.loader.close()
        world.close()
    return compared(seen)


def same_traffic(sent: dict[str, int], formula: dict[str, float], *, masked: bool) -> None:
    """Equal but for the rounding of every collective; how many words ERNIE masks is a matter of the data."""
    assert set(sent) == set(formula)
    for name, size in sent.items():
        if not (masked and name == "mp/all_reduce"):
            assert formula[name] == pytest.approx(size, rel=1e-4, abs=8), name


def first(names: Iterable[str], chosen: Sequence[str]) -> list[ParameterSet]:
    """Every name; those that are not chosen for ``-m table``."""
    assert set(chosen) <= set(names)
    return [pytest.param(name, marks=[] if name in chosen else [pytest.mark.table]) for name in names]


@pytest.mark.parametrize("name", first(TRACED, TRACED_FIRST))
def test_plans_are_within_two_percent_of_the_traced_trainer_or_bound_it(name: str) -> None:
    peak, planned, sent, told, most = run_ranks(1, traced, name, group=False, timeout=120)[0]
    further = FURTHER.get(name, 0.02)
    assert peak * (1 - further) <= planned <= peak * max(most, 1 + further) * (1 + UNCOUNTED_SHARE)
    same_traffic(sent, told, masked="ernie" in name)


@pytest.mark.parametrize("name", first(FEW, FULL_FIRST))
def test_what_is_remembered_and_left_out_changes_nothing(name: str) -> None:
    short, full = run_ranks(1, traced_in_full, name, group=False, timeout=300)[0]
    # But for a scalar or two that are made once in a process.
    for figure in ("peak", "resting"):
        assert short.pop(figure) == pytest.approx(full.pop(figure), rel=0, abs=64), figure
    assert short == full


@pytest.mark.parametrize("name", first(MEASURED, MEASURED_FIRST))
def test_a_plan_is_a_bound_of_real_runs(name: str) -> None:
    ranks, line = MEASURED[name]
    for peak, planned, sent, told, most in run_ranks(ranks, measured, line, group=False):
        assert peak <= planned <= most * peak
        same_traffic(sent, told, masked=False)


def test_two_byte_state_saves_what_is_planned() -> None:
    """On one rank, where the plan of a CPU is no bound."""
    plain = run_ranks(1, measured, THREE, group=False)[0]
    for name, flags in (*TWO_BYTES.items(), ("all", " ".join(TWO_BYTES.values()))):
        narrow = run_ranks(1, measured, f"{THREE} {flags}", group=False)[0]
        saved, planned = (before - after for before, after in zip(plain[:2], narrow[:2], strict=True))
        assert saved == pytest.approx(planned, rel=0.03), name
        assert saved > 0, name


def test_the_command_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--num-experts", "0", "--num-layers", "2", "--dtype", "bf16", "--micro-batch-size", "1"]
    flags = [*model, "--world-size", "64", "--mp-degree", "4"]
    assert main(["plan", "--trace", "--trace-rank", "5", *flags, "--local-checkpoint-interval", "2"]) == 0
    said = capsys.readouterr().out
    assert "trace of rank 5 (stage 0)" in said
    assert "by formula" in said
    assert main(["plan", "--trace", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)["trace"]
    assert found["peak"] > found["resting"] > found["parameters"] + found["optimizer"] > 0
    assert found["sent_bytes"]["mp/all_reduce"] > 0


def test_what_only_values_decide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", "--trace-rank", "9", "--num-experts", "0", "--world-size", "2"]) == 2
    assert "is not one of the 2 ranks" in capsys.readouterr().err


def traced_packed(rank: int, world_size: int, rendezvous: str, name: str) -> Found:
    """A trace on a device that copies the gradients of a sharded bucket together, once it has all of them."""
    rows, classes = kinds._tables()
    packing = {kind: replace(one, packs_rows=True) for kind, one in classes.items()}
    with patch.object(kinds, "_tables", lambda: (rows, packing)):
        return traced(rank, world_size, rendezvous, name)


@pytest.mark.parametrize("name", [pytest.param("sharding 8", marks=pytest.mark.table), "large shards"])
def test_plans_know_gradients_that_wait_for_their_bucket(name: str) -> None:
    peak, planned, *_ = run_ranks(1, traced, name, group=False, timeout=120)[0]
    packed, planned_packed, *_ = run_ranks(1, traced_packed, name, group=False, timeout=120)[0]
    assert planned_packed - planned == pytest.approx(packed - peak, abs=0.02 * peak)
