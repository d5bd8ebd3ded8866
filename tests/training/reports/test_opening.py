"""What the log of a run begins with, against the configuration and the corpus that it speaks of."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megapar import __version__
from megapar.arguments import FLAGS, Config, parse, resolved_values
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.grid import Grid
from megapar.data import build
from megapar.data.sample_maker import Content
from megapar.training.building.corpus import make_corpus
from megapar.training.building.device_choices import kind_of_run
from megapar.training.building.parallelize import parallelize
from megapar.training.reports import opening
from megapar.training.step.batches import BatchFeed
from megapar.training.step.dtypes import with_dtype
from megapar.training.step.progress import Progress
from tests.support.ranks import run_ranks
from tests.support.training import SMALL, last_wins

LINES = "".join(json.dumps({"text": f"{number} times a line of text"}) + "\n" for number in range(400))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text(LINES + json.dumps({"text": name}) + "\n", encoding="utf-8")
    Path("run.yaml").write_text("hidden_size: 32\nseed: 7\n", encoding="utf-8")


class _Gpu(Device):
    """A GPU that the device table does not have."""

    type = "cuda"
    name = "NVIDIA GeForce RTX 3090"  # type: ignore[assignment]
    capability = (8, 6)  # type: ignore[assignment]


def said(
    kind: str, line: str, *, compiled: bool = False, device: Device | None = None, start: str = "full"
) -> list[str]:
    config = parse(kind, [*last_wins(SMALL[kind], line.split()), "--log-start", start], {})
    corpus = make_corpus(config)
    world = World(config.grid, 0, device or Device(), None, torch.distributed.default_pg_timeout)
    after = opening.opening(config, world, corpus, opening.hosts(world), compiled=compiled)
    return [*opening.header(config, world.device), *after]


def test_a_gpu_without_a_row_has_another_ones_speed_and_its_own_kernels() -> None:
    line = "--bf16 --num-attention-heads 2 --hidden-size 400 --link-gb 16 --data-path a.jsonl"
    lines = said("moe", line, device=_Gpu())
    assert next(text for text in lines if text.startswith("device: ")).startswith(
        "device: NVIDIA GeForce RTX 3090 is not in the device table; choices that depend on speed take the figures of "
        "h100-80g with 16 GB/s in a node"
    )
    assert "attention: causal by efficient (today's choice)" in lines  # an H100 would take heads of 200 features
    assert not [text for text in said("moe", line) if text.startswith("device: ")]


def test_a_gpu_without_a_row_has_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Gpu, "name", "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(_Gpu, "capability", (7, 0))
    monkeypatch.setattr(_Gpu, "default_dtype", torch.float16)
    lines = said("moe", "--device-tflops 100 --data-path a.jsonl", device=_Gpu())
    assert "attention: causal by efficient (today's choice)" in lines
    assert any("take the figures of h100-80g with 100 TFLOP/s in fp16" in text for text in lines)
    config = parse("moe", ["--device-tflops", "100"], {})
    assert kind_of_run(with_dtype(config, _Gpu()), "cuda", _Gpu.name).title.endswith("with 100 TFLOP/s in fp16")


def test_a_model_without_a_row_has_the_figures_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Gpu, "name", "Ascend910B1")
    lines = said("moe", "--bf16 --data-path a.jsonl", device=_Gpu())
    assert next(text for text in lines if text.startswith("device: ")) == (
        "device: Ascend910B1 is not in the device table; choices that depend on speed take the figures of ascend-910b, "
        "and so does MFU"
    )


@pytest.mark.parametrize(
    ("line", "compiled", "decision"),
    [
        ("--compile on", True, "on (--compile)"),
        ("--compile on", False, "on (--compile), but a rank cannot compile"),
        ("--compile off", False, "off (--compile)"),
    ],
)
def test_the_result_of_the_compilers_trial_is_told(line: str, compiled: bool, decision: str) -> None:
    assert f"compiled functions: {decision}" in said("moe", f"{line} --data-path a.jsonl", compiled=compiled)


def test_fp8_is_told_with_its_emulation_or_with_both_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--fp8 --hidden-size 128 --num-attention-heads 4 --head-dim 64 --ffn-hidden-size 128"
    line += " --data-path a.jsonl"
    (text,) = (one for one in said("moe", f"{line} --device cpu") if one.startswith("fp8: "))
    assert text.startswith("fp8: emulated, with dequantized operands in the dtype of the run (e4m3, ")
    monkeypatch.setattr(_Gpu, "name", "NVIDIA H100 80GB HBM3")
    (text,) = (one for one in said("moe", f"{line} --bf16", device=_Gpu()) if one.startswith("fp8: "))
    assert text.endswith("MFU is of the peak in bf16 (989 TFLOP/s in bf16, 1,979 TFLOP/s in fp8)")
    assert not [one for one in said("moe", "--data-path a.jsonl") if one.startswith("fp8: ")]
    monkeypatch.setattr(_Gpu, "name", "NVIDIA GH200 480GB")
    (text,) = (one for one in said("moe", f"{line} --bf16", device=_Gpu()) if one.startswith("fp8: "))
    assert text.endswith("MFU is of the peak in bf16")  # whose figures are an H100's


def test_versions_hosts_flags_and_data_are_told() -> None:
    flags = "--config run.yaml --data-path a.jsonl --vocab-size 300 --no-packing --lr 0.001 --train-iters 7 --seed 1234"
    told = said("moe", flags)
    assert f"megapar {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}, cpu" in told[0]
    assert re.search(r"; started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}$", told[0])
    assert told[1] == "flags that differ from the defaults, run.yaml included:"
    assert f"1 host: {socket.gethostname()} (1 rank)" in told
    text = "\n".join(told)
    assert "--hidden-size 32" in text
    assert "--no-packing" in text
    assert "--lr" not in text  # asked for, and the default
    assert "--seed" not in text  # another one in the file, the default on the line
    rest = r"a.jsonl: (\d+) documents of ([\d,]+) tokens on average, ([\d,]+) tokens$"
    counted = re.search(f"^trained on: {rest}", text, re.MULTILINE)
    aside = re.search(f"^held out:   {rest}", text, re.MULTILINE)
    assert int(counted[1]) + int(aside[1]) == 401
    assert int(counted[2]) == round(int(counted[3].replace(",", "")) / int(counted[1]))
    assert re.search(
        r"^tokenizer:  trained on this data, (which gives \d+ ids of 300 rows|300 ids), fingerprint [0-9a-f]{32}$",
        told[-1],
    )


def test_a_log_begins_with_what_the_run_is() -> None:
    many = " ".join(f"--{name} {'x' * 50}" for name in ("metrics-jsonl", "tensorboard-dir", "save"))
    told = said("moe", f"--config run.yaml --data-path a.jsonl --vocab-size 300 {many}", start="short")
    assert [line.partition(":")[0].partition(" ")[0] for line in told] == [
        *("megapar", "flags", "", "trained", "held", "evaluation", "this", "tokenizer")
    ]
    assert told[2].endswith("... (--log-start full)")
    assert "--seed" not in "".join(told)  # it is in the file
    assert not [line for line in told if len(line) > opening.WIDTH]


def test_files_that_blank_lines_cut_into_short_documents_name_the_flag() -> None:
    line = "--data-path texts --vocab-size 300 --train-iters 1 --seq-length"
    Path("texts").mkdir()
    for number in range(80):
        Path(f"texts/{number}.txt").write_text("\n\n".join(f"{number} and {other}" for other in range(20)))

    def named(flags: str) -> list[str]:
        return [text for text in said("moe", f"{line} {flags}", start="short") if "--document-per file" in text]

    (text,) = named("512 --document-per paragraph")
    assert text.strip().startswith("blank lines make documents that are much shorter than samples; --document-per file")
    assert len(text) <= opening.WIDTH
    assert named("64 --document-per paragraph") == named("512") == []
    Path("one.txt").write_text("\n\n".join(f"one and {number}" for number in range(400)))
    line = line.replace("texts", "one.txt")
    assert named("512 --document-per paragraph") == []  # of one file, as one document, nothing could be held out


def test_flags_of_several_files_are_told() -> None:
    Path("more.yaml").write_text("weight_decay: 0.25\n", encoding="utf-8")
    text = "\n".join(said("moe", "--config run.yaml --config more.yaml --data-path a.jsonl --vocab-size 300"))
    assert "--seed 7" in text
    assert "--weight-decay 0.25" in text


def test_epochs_follow_from_the_samples() -> None:
    told = said("moe", "--data-path a.jsonl --vocab-size 300 --train-iters 50 --seq-length 16")
    found = next(line for line in told if line.startswith("this run:"))
    samples = re.search(r"50 steps, ([\d,]+) samples, ([\d,]+) positions, (\S+) epochs$", found)
    corpus = build("moe", data_path=["a.jsonl"], vocab_size=300, seq_length=16, seed=1)
    count = int(samples[1].replace(",", ""))
    assert int(samples[2].replace(",", "")) == 16 * count
    assert float(samples[3]) == pytest.approx(count / len(corpus.train), rel=0.01)


def test_the_share_of_the_held_out_samples_that_an_evaluation_reads_is_told() -> None:
    line = "--data-path a.jsonl --vocab-size 300 --seq-length 8 --global-batch-size 4 --eval-interval 5 --eval-iters"
    count = len(make_corpus(parse("moe", last_wins(SMALL["moe"], f"{line} 3".split()), {})).heldout or ())
    assert f"evaluation: 12 of {count:,} held-out samples" in said("moe", f"{line} 3")
    assert f"evaluation: {count:,} of {count:,} held-out samples" in said("moe", f"{line} 100000")
    assert not [text for text in said("moe", f"{line} 3 --eval-interval 0") if text.startswith("evaluation:")]


def test_a_mixture_has_epochs_of_its_parts() -> None:
    parts = [Content("a", 1, 10, 100, Fraction(3)), Content("b", 1, 10, 10, Fraction(1))]
    assert opening.epochs(200, parts) == "1.5 and 5 epochs of its parts"
    assert opening.epochs(220, [Content("a", 1, 10, 100), Content("b", 1, 10, 10)]) == "2 epochs"
    assert opening.epochs(200, [Content("mock", None, None, None)]) is None
    told = said("moe", "--data-path 0.7 a.jsonl 0.3 b.jsonl --vocab-size 300")
    (line,) = [line for line in told if line.startswith("trained on:")]
    assert "a.jsonl: " in line
    assert line.endswith("weight 0.7")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("moe", "--rampup-batch-size 2 2 20 --global-batch-size 8 --micro-batch-size 2 --train-iters 9"),
        ("moe", "--rampup-batch-size 2 2 20 --global-batch-size 8 --micro-batch-size 2 --train-iters 3"),
        ("ernie", "--progressive-iters 6 --global-batch-size 8 --micro-batch-size 2 --train-iters 9"),
        ("ernie", "--progressive-iters 6 --global-batch-size 8 --micro-batch-size 2 --train-iters 4"),
    ],
)
def test_the_samples_of_a_run_are_those_that_it_reads(kind: str, flags: str) -> None:
    config = parse(kind, last_wins(SMALL[kind], ["--data-path", "mock", *flags.split()]), {})
    world = World(config.grid, 0, Device(), None, torch.distributed.default_pg_timeout)
    feed, progress = BatchFeed(config, parallelize(config, world)), Progress()
    positions = 0
    for _ in range(config.training.train_iters):
        batch, length = feed._grow(progress)
        progress.consumed_samples += batch
        positions += batch * (length or config.model.seq_length)
        progress.iteration += 1
    assert opening.consumption(config) == (progress.consumed_samples, positions)


def test_a_switch_is_told_as_it_would_be_written() -> None:
    for flag in FLAGS.values():
        for value in (True, False) if flag.type == "bool" and not flag.meta else ():
            line = [opening._line(flag, value), "--rules-only"]
            assert resolved_values(flag.models[0], line, {})["requested"][flag.name] is value


def hosts_of(rank: int, world_size: int, rendezvous: str) -> list[str]:
    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        world = World.start(Grid(sharding=world_size), Device(), timedelta(seconds=60), f"file://{rendezvous}")
    with patch.object(opening.socket, "gethostname", lambda: f"node-{world.rank // 2}"):
        found = opening.hosts(world)
    world.close()
    return found


def test_every_rank_knows_all_hosts() -> None:
    results = run_ranks(3, hosts_of, group=False)
    assert results == [["node-0", "node-0", "node-1"]] * 3
    assert opening._hosts(results[0]) == "2 hosts: node-0 (2 ranks), node-1 (1 rank)"
    many = [f"node-{number}" for number in range(9)]
    assert opening._hosts(many).endswith("node-5 (1 rank), 3 more")


EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 32"
SMALL_EXPERTS = "--hidden-size 64 --num-attention-heads 4 --num-layers 2"


class Without(Device):
    """Has no kernel for grouped products."""

    def grouped_lacks(self, dtype: torch.dtype, widths: Iterable[int]) -> str:
        """Says what it was asked."""
        return f"asked for {dtype} of {list(widths)}"


@pytest.mark.parametrize(
    ("flags", "device", "said"),
    [
        (f"{EXPERTS} --bf16", Device(), "experts: one grouped GEMM for all experts of a rank"),
        (f"{EXPERTS} --dtype fp64", Device(), "reads once per layer: no kernel takes float64"),
        (f"{EXPERTS} --fp16", Without(), "reads once per layer: asked for torch.float16 of [32, 64]"),
        (f"{EXPERTS} --bf16 --mp-degree 2 --expert-mp-degree 2", Without(), "of [16, 64]"),
        (
            f"{EXPERTS} --ep-degree 2 --moe-model-type deepspeed_moe --use-pipe-experts",
            Without(),
            "one product per expert and piece of its rows",
        ),
        ("--num-experts 0", Without(), ""),
    ],
)
def test_the_form_of_the_experts_products_is_said(flags: str, device: Device, said: str) -> None:
    world = 2 if "degree" in flags else 1
    config = parse("moe", f"{SMALL_EXPERTS} {flags}".split(), {"WORLD_SIZE": str(world), "RANK": "0"})
    found = opening.expert_products(config, config.model, device)
    assert said in found
    assert bool(found) == bool(said)


SIZES = ("--num-experts", "8", "--moe-router-topk", "2", "--seq-length", "64", "--micro-batch-size", "2")


def dropless(*flags: str, world_size: int = 1) -> Config:
    return parse("moe", [*SIZES, *flags], {"WORLD_SIZE": str(world_size), "RANK": "0"})


@pytest.mark.parametrize(
    ("flags", "world_size", "rows"),
    [
        ((), 1, (256, 256)),
        (("--ep-degree", "4"), 4, (256, 1024)),
        (("--ep-degree", "8"), 8, (256, 1024)),  # one expert here: a token comes once
        (("--moe-model-type", "deepspeed_moe"), 1, None),
        (("--cp-degree", "2", "--ep-degree", "2"), 2, (128, 256)),
        (("--data-path", "a=builtin", "--data-phases", "0: a=1; 8 samples: a=1 seq-length=128"), 1, (512, 512)),
    ],
)
def test_rows_of_dropless_experts_by_hand(
    flags: tuple[str, ...], world_size: int, rows: tuple[int, int] | None
) -> None:
    assert opening.expert_rows(dropless(*flags, world_size=world_size)) == rows


def test_the_bound_is_said_where_nothing_is_dropped() -> None:
    flags = ("--hidden-size", "64", "--moe-ffn-hidden-size", "32", "--num-attention-heads", "4", "--ep-degree", "4")
    said = opening.expert_bound(dropless(*flags, world_size=4), 2)
    assert "256 rows" in said
    assert "1,024 rows" in said
    assert opening.expert_bound(dropless("--moe-model-type", "deepspeed_moe"), 2) == ""
