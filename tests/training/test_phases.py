"""Runs through phases of their data: ledgers of what each source gave, over kills, resumes and other layouts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.arguments import parse
from megapar.config.config import Config
from megapar.data.tokens.indexed import IndexedDatasetBuilder
from megapar.errors import CheckpointError, ConfigError
from megapar.tools.evaluate import trainer_line
from megapar.trainer import train
from megapar.training.loop.callbacks import TrainerCallback
from megapar.training.loop.outline import outline
from tests.support.ranks import run_ranks
from tests.support.training import last_wins

LENGTH = 16
SIZES = {"a": 20, "b": 12, "c": 10}  # windows of LENGTH
BASES = {"a": 0, "b": 100, "c": 200}  # a window's tokens tell it
MODEL = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--ffn-hidden-size", "16"),
    *("--seq-length", str(LENGTH), "--vocab-size", "400", "--num-experts", "0", "--dtype", "fp64", "--lr", "1e-3"),
    *("--eval-interval", "0", "--split", "100,0", "--global-batch-size", "4", "--micro-batch-size", "1"),
    *("--lr-decay-iters", "50", "--adam-eps", "1e-5"),
)
WEIGHTS = "0: a=2,b=1; 24 samples: a=1,c=2,b=1; 1200 tokens: c=1,a=3"
LENGTHS = (
    "0: a=1,b=1; 5 iterations: b=1,a=2 seq-length=32 global-batch-size=8; "
    "36 samples: a=1 lr=1e-4:linear; 60 samples: a=1,b=3 seq-length=32"
)


class Killed(Exception):
    """What ends a run between two checkpoints."""


class Ledger(TrainerCallback):
    """Writes the first token of every sample of each step to a file of the rank, and dies before a step."""

    def __init__(self, folder: Path, dies_before: int = 0) -> None:
        self.folder, self.dies_before = folder, dies_before

    def begin(self, trainer: Any) -> None:
        step, progress = trainer.loader.step, trainer.progress
        path = self.folder / f"{os.getpid()}.jsonl"

        def recorded(*request: Any) -> Any:
            batches = step(*request)
            shapes = [tuple(batch.tensors["tokens"].shape) for batch in batches]
            first = [token for batch in batches for token in batch.tensors["tokens"][:, 0].tolist()]
            with path.open("a") as file:
                file.write(json.dumps([progress.iteration + 1, shapes[0][1], first]) + "\n")
            return batches

        trainer.loader.step = recorded

    def before_step(self, iteration: int) -> None:
        if iteration == self.dies_before:
            raise Killed


def write_sources(folder: Path) -> list[str]:
    """Write the sources, and return their words on a command line."""
    for name, size in SIZES.items():
        with IndexedDatasetBuilder(str(folder / name), "uint16") as builder:
            tokens = np.append(np.repeat(np.arange(size), LENGTH), 0) + BASES[name]
            builder.add_item(tokens.astype(np.uint16))
            builder.end_document()
            builder.finalize()
    return [f"{name}={folder / name}" for name in SIZES]


def train_rank(rank: int, world_size: int, rendezvous: str, line: Sequence[str], folder: str, dies: int) -> Any:
    config = parse("moe", line, dict(os.environ))
    return train(config, f"file://{rendezvous}", keep_records=True, callbacks=[Ledger(Path(folder), dies)])


class Runs:
    """Runs of one small model on the sources, each with a folder of its own for its ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sources, self.count = folder, write_sources(folder), 0

    def line(self, phases: str, steps: int, *flags: str) -> list[str]:
        """Return the flags of a run; without phases, of one on a blend of two files without names."""
        if not phases:
            blend = [word for weight, one in zip("21", self.sources, strict=False) for word in (weight, one[2:])]
            return [*last_wins(MODEL, ("--train-iters", str(steps), *flags)), "--data-path", *blend]
        places = ("--train-iters", str(steps), "--data-phases", phases, *flags)
        return [*last_wins(MODEL, places), "--data-path", *(one for one in self.sources if f"{one[0]}=" in phases)]

    def run(self, phases: str, steps: int, *flags: str, world: int = 1, dies: int = 0) -> tuple[Any, dict[int, Any]]:
        """Run, and return the outcome and the ledger: step -> (length, first tokens of all ranks, sorted).

        The outcome is None if the run dies before a step.
        """
        self.count += 1
        place = self.folder / f"ledger-{self.count}"
        place.mkdir()
        line, outcome = self.line(phases, steps, *flags), None
        if world == 1:
            try:
                outcome = train(parse("moe", line, {}), keep_records=True, callbacks=[Ledger(place, dies)])
            except Killed:
                assert dies
        else:
            outcome = run_ranks(world, train_rank, line, str(place), dies, group=False)[0]
        ledger: dict[int, Any] = {}
        for path in place.iterdir():
            for text in path.read_text().splitlines():
                step, length, first = json.loads(text)
                ledger[step] = length, sorted([*ledger.get(step, (0, []))[1], *first])
        return outcome, ledger

    def config(self, phases: str, steps: int) -> Config:
        return parse("moe", self.line(phases, steps), {})


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def check_once_per_epoch(ledger: dict[int, Any], least_epochs: dict[tuple[str, int], int]) -> None:
    """Every sample of a source at one length once, before any is read again; at least so many epochs are there."""
    read: dict[tuple[str, int], Counter[int]] = {}
    for step in sorted(ledger):
        length, first = ledger[step]
        for token in first:
            name = max((name for name in BASES if BASES[name] <= token), key=BASES.__getitem__)
            read.setdefault((name, length), Counter())[token] += 1
        for (name, size), counts in read.items():
            every = len(counts) == SIZES[name] * LENGTH // size
            assert max(counts.values()) - min(counts.values()) <= every
    assert {key: counts.total() // (SIZES[key[0]] * LENGTH // key[1]) for key, counts in read.items()} == least_epochs


def test_three_epochs_over_phases_with_a_kill_and_two_resumes_on_other_layouts(runs: Runs) -> None:
    straight, ledger = runs.run(WEIGHTS, 35)
    check_once_per_epoch(ledger, {("a", 16): 3, ("b", 16): 1, ("c", 16): 4})
    spans = runs.config(WEIGHTS, 35).phases.spans
    assert [span.first_sample for span in spans] == [0, 24, 76]
    save = ("--save", str(runs.folder / "saved"), "--load", str(runs.folder / "saved"), "--save-interval", "5")
    first, one = runs.run(WEIGHTS, 35, *save[:2], *save[4:], "--micro-batch-size", "2", dies=9)
    assert first is None
    assert max(one) == 8  # step 5 is the last that is saved
    _, two = runs.run(WEIGHTS, 35, *save, "--exit-interval", "13", world=2)
    last, three = runs.run(WEIGHTS, 35, *save, "--micro-batch-size", "4")
    assert (min(two), max(two), min(three), max(three)) == (6, 13, 14, 35)
    assert {**one, **two, **three} == ledger
    assert all(one[step] == ledger[step] for step in one)
    assert [record.consumed_samples for record in last.records] == [4 * step for step in range(14, 36)]
    for again, want in zip(last.records, straight.records[13:], strict=True):
        assert again.loss == pytest.approx(want.loss, rel=1e-11)


def test_lengths_batches_and_rates_change_with_the_phase(runs: Runs) -> None:
    straight, ledger = runs.run(LENGTHS, 20)
    check_once_per_epoch(ledger, {("a", 16): 1, ("b", 16): 0, ("a", 32): 1, ("b", 32): 4})
    shapes = [(ledger[step][0], len(ledger[step][1])) for step in range(1, 21)]
    assert shapes == [(16, 4)] * 5 + [(32, 8)] * 2 + [(16, 4)] * 6 + [(32, 4)] * 7
    positions = [record.consumed_tokens for record in straight.records]
    plan = runs.config(LENGTHS, 20).phases
    assert positions == [plan.after(step).first_position for step in range(1, 21)]
    falls = [record.lr for record in straight.records[7:13]]
    begin = straight.records[6].lr
    assert falls[0] < begin
    assert falls == pytest.approx([1e-4 + (falls[0] - 1e-4) * (1 - step / 6) for step in range(6)])


LAYOUTS = {
    "cp 2": ("--cp-degree", "2"),
    "pp 2": ("--pp-degree", "2"),
    "mp 2": ("--mp-degree", "2", "--sequence-parallel"),
    "cp 2, gathered": ("--cp-degree", "2", "--context-parallel-algo", "allgather_cp_algo"),
    "cp 2, by heads": ("--cp-degree", "2", "--context-parallel-algo", "ulysses_cp_algo"),
    "stage 3": ("--sharding-degree", "2", "--sharding-stage", "3"),
    "interleaved": ("--pp-degree", "2", "--pp-schedule", "interleaved", "--vpp-degree", "2"),
    "2 slices": ("--ep-degree", "2", "--ampipe-degree", "2"),
}
SMALL_ONES = ("cp 2", "pp 2")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in SMALL_ONES else pytest.mark.table) for name in LAYOUTS]
)
def test_phases_of_other_lengths_have_the_numbers_of_one_process(layout: str, runs: Runs) -> None:
    model = ("--num-layers", "4" if layout == "interleaved" else "2", "--num-experts")
    model += ("4", "--moe-ffn-hidden-size", "8") if layout == "2 slices" else ("0",)
    want, _ = runs.run(LENGTHS, 16, *model)
    got, _ = runs.run(LENGTHS, 16, *model, *LAYOUTS[layout], world=2)
    assert len(got.records) == 16
    for again, record in zip(got.records, want.records, strict=True):
        assert again.loss == pytest.approx(record.loss, rel=1e-11)
        assert again.grad_norm == pytest.approx(record.grad_norm, rel=1e-9)


def test_the_order_of_a_source_depends_on_its_name_and_on_nothing_else(runs: Runs) -> None:
    def of_a(ledger: dict[int, Any]) -> list[int]:
        return [token for step in sorted(ledger) for token in ledger[step][1] if token < BASES["b"]]

    batch = ("--global-batch-size", "1")
    want = of_a(runs.run("0: a=1,b=1,c=1", 30, *batch)[1])[:8]
    assert of_a(runs.run("0: c=1,b=9,a=3; 9 samples: a=1", 22, *batch)[1])[:8] == want
    runs.sources = runs.sources[::-1]
    assert of_a(runs.run("0: b=1; 5 samples: c=1,a=1", 22, *batch)[1])[:8] == want
    runs.sources = ["1", runs.sources[2], "2", runs.sources[1]]
    line = [*last_wins(MODEL, ("--train-iters", "1")), "--data-path", *runs.sources]
    assert parse("moe", line, {}).data.data_path == tuple(runs.sources)


@pytest.mark.parametrize("phases", ["", "0: a=2,b=1; 40 samples: c=1"], ids=["blend", "phases"])
def test_skipped_first_samples_move_no_other_saved_or_not(phases: str, runs: Runs) -> None:
    whole = runs.run(phases, 6)[1]
    for save in ((), ("--save", str(runs.folder / "saved"))):
        skipped = runs.run(phases, 5, "--skip-samples", "0-3", *save)[1]
        assert skipped == {step - 1: whole[step] for step in range(2, 7)}


def test_a_source_ends_the_run_before_it_repeats(runs: Runs, told: list[str]) -> None:
    stop = ("--on-source-end", "stop", "--save", str(runs.folder / "saved"))
    done, ledger = runs.run(WEIGHTS, 35, *stop)
    repeats, whole = runs.run(WEIGHTS, 35)
    assert done.iteration < repeats.iteration == 35
    assert ledger == {step: whole[step] for step in range(1, done.iteration + 1)}
    read = [token for _, first in ledger.values() for token in first]
    assert len(set(read)) == len(read)
    repeated = set(read) & set(whole[done.iteration + 1][1])  # not a step too early
    names = {max((name for name in BASES if BASES[name] <= token), key=BASES.__getitem__) for token in repeated}
    (line,) = (line for line in told if line.startswith("ended at"))
    begin = f"ended at iteration {done.iteration}: the next step would repeat a sample of "
    assert any(line.startswith(f"{begin}{name}=") for name in names)
    assert done.checkpoint is not None
    assert done.checkpoint.name == f"iter_{done.iteration:07d}"
    again, nothing = runs.run(WEIGHTS, 35, *stop, "--load", str(runs.folder / "saved"))
    assert (again.iteration, nothing) == (done.iteration, {})
    told.clear()
    runs.run(WEIGHTS, done.iteration, *stop[:2])  # all of its steps
    assert not any(line.startswith("ended at") for line in told)


def test_the_future_may_change_and_the_past_may_not(runs: Runs, told: list[str]) -> None:
    save = ("--save", str(runs.folder / "saved"), "--load", str(runs.folder / "saved"), "--save-interval", "1")

    def at(step: int) -> tuple[str, ...]:
        return ("--ckpt-step", str(step), "--save", str(runs.folder / f"saved{runs.count}"), "--save-interval", "7")

    runs.run("0: a=2,b=1; 24 samples: a=1,c=2", 10, *save)
    told.clear()
    _, ledger = runs.run("0: a=2,b=1; 24 samples: c=2,a=1; 48 samples: b=1", 13, *save[2:4], *at(10))
    assert [line for line in told if "data from sample" in line] == [
        "planned data from sample 48 on: b continues after 8 samples"
    ]
    assert ledger[13] == (16, sorted(ledger[13][1]))
    assert min(ledger[13][1]) >= BASES["b"]
    runs.run("0: a=2,b=1; 16 samples: c=1", 6, *save[2:4], *at(4))  # cut short where the run stands
    for phases, flags, words in (
        (
            "0: a=2,b=1; 20 samples: a=1,c=2",
            (),
            ["c is read here only (samples 20 to 23)", "--override-data sources "],
        ),
        ("0: a=2,b=1,c=1; 24 samples: a=1,c=2", (), ["c is read here only (samples 0 to 23)"]),
        ("0: a=2,b=1; 24 samples: a=1,c=2 seq-length=32", (), ["--seq-length is 16 there and 32 here"]),
        ("0: a=2,b=1; 6 iterations: a=1,c=2", ("--global-batch-size", "8"), ["phases-position", "would be 80"]),
    ):
        with pytest.raises((ConfigError, CheckpointError)) as refused:
            runs.run(phases, 12, *save[2:4], *flags, *at(10))
        said = " ".join(str(refused.value).split())
        assert [word for word in words if word not in said] == [], said
    phases, fields = "0: a=1; 20 samples: a=1,c=2; 48 samples: b=1", ("--override-data", "sources,weights")
    runs.run(phases, 12, *save[2:4], *at(10), *fields)
    own = str(runs.folder / f"saved{runs.count - 1}")
    told.clear()
    _, after = runs.run(phases, 14, "--load", own, "--save", own)  # what was overridden is past
    assert not [line for line in told if "data from" in line]
    assert min(token for step in (13, 14) for token in after[step][1]) >= BASES["b"]


def test_a_phase_begins_by_steps_though_updates_were_skipped(runs: Runs) -> None:
    phases, save = "0: a=1; 2 iterations: a=1 seq-length=32 lr={}:linear", str(runs.folder / "skipped")

    class Skipped(TrainerCallback):
        """Three of four steps change nothing."""

        def begin(self, trainer: Any) -> None:
            self.optimizer = trainer.job.optimizer

        def after_step(self, iteration: int) -> None:
            self.optimizer.num_steps = 1

    train(parse("moe", runs.line(phases.format("1e-4"), 4, "--save", save), {}), callbacks=[Skipped()])
    with pytest.raises(CheckpointError, match="the lr of the phases so far is 2-4 to"):
        runs.run(phases.format("1e-4"), 6, "--load", save)
    with pytest.raises(ConfigError, match="the lr of the phases so far"):
        outline(parse("moe", runs.line(phases.format("2e-4"), 4, "--load", save), {}))
    assert "--seq-length 32" in " ".join(trainer_line([save, "--data-path", *runs.sources[:1]]))


def test_named_evaluation_sets_have_a_loss_each_and_their_mean_over_tokens(runs: Runs, tmp_path: Path) -> None:
    def evaluated(*sets: str, world: int = 1) -> Any:
        paths = [word.partition("=")[2] if len(sets) == 1 else word for word in sets]
        flags = ("--eval-interval", "2", "--eval-iters", "9", "--metrics-jsonl", str(tmp_path / "metrics.jsonl"))
        base = [*last_wins(MODEL, ("--train-iters", "2", *flags)), "--data-path", runs.sources[2]]
        line = [one for one in base if one not in ("--split", "100,0")]
        place = str(tmp_path)
        return run_ranks(world, train_rank, [*line, "--eval-data-path", *paths], place, 0, group=False)[0].records[1]

    words = runs.sources[:2]
    one, other, both = evaluated(words[0]), evaluated(words[1]), evaluated(*words)
    assert both.eval_sets == {"a": one.eval_loss, "b": other.eval_loss}
    assert one.eval_sets == {}
    share = SIZES["a"] / (SIZES["a"] + SIZES["b"])
    assert both.eval_loss == pytest.approx(share * one.eval_loss + (1 - share) * other.eval_loss, rel=1e-14)
    assert both.scalars()["eval_loss/a"] == one.eval_loss
    written = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written[-1]["eval_sets"] == both.eval_sets
    again = evaluated(*words, world=2)
    assert again.eval_sets == pytest.approx(both.eval_sets, rel=1e-12)
    assert again.eval_loss == pytest.approx(both.eval_loss, rel=1e-12)
