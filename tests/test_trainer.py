"""The trainer: resumed, moved to other layouts, evaluated and reported."""

from __future__ import annotations

import gc
import json
import os
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megapar.arguments import parse
from megapar.errors import DataError
from megapar.trainer import Trainer, train
from megapar.training.loop.callbacks import TrainerCallback
from megapar.training.reports import time_left
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record
from megapar.training.reports.terminal import PlainTerminal, ProgressTerminal
from megapar.training.step import bad_steps as numbers
from tests.support.here import run_here
from tests.support.objects import object_bytes
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.token_files import write_tokens
from tests.support.training import COMMON, SMALL, last_wins, run

Flags = tuple[str, ...]
FP64 = ("--dtype", "fp64")
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
LAYOUTS = {
    "1 process": (1, ()),
    "sharding 2": (2, ("--sharding-degree", "2")),
    "sharding 4, stage 3": (4, ("--sharding-degree", "4", "--sharding-stage", "3")),
    "sharding 2 x dp 2, stage 2": (4, ("--sharding-degree", "2", "--sharding-stage", "2", "--hybrid-dp")),
    "sharding 2, stage 3": (2, ("--sharding-degree", "2", "--sharding-stage", "3")),
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor of a checkpoint, by file and name."""
    return {f"{f.name}/{k}": v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


@pytest.mark.parametrize("kind", ["moe", "ernie"])
@pytest.mark.parametrize("layout", ["1 process", "sharding 2", "sharding 2, stage 3"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind: str, layout: str, tmp_path: Path) -> None:
    world_size, flags = LAYOUTS[layout]
    flags = (*flags, *DROPOUT, "--dtype", "bf16")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    whole = run(world_size, kind, *flags, "--save", str(straight))
    run(world_size, kind, *flags, "--save", str(broken), "--save-interval", "3")
    (broken / "latest").write_text("iter_0000003")
    resumed = run(world_size, kind, *flags, "--save", str(tmp_path / "new"), "--load", str(broken))
    assert [r.iteration for r in resumed.records] == [4, 5, 6]
    assert [r.loss for r in resumed.records] == [r.loss for r in whole.records[3:]]
    assert [r.consumed_tokens for r in resumed.records] == [r.consumed_tokens for r in whole.records[3:]]
    want, got = weights(straight / "iter_0000006"), weights(tmp_path / "new" / "iter_0000006")
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("kind", ["moe", "ernie"])
def test_a_checkpoint_goes_on_on_every_layout(kind: str, tmp_path: Path) -> None:
    """Save on sharding 2, continue elsewhere, dropout on: the losses are those of the run that never stopped."""
    straight = run(1, kind, *FP64, *DROPOUT)
    run(2, kind, *FP64, *DROPOUT, *LAYOUTS["sharding 2"][1], "--save", str(tmp_path), "--save-interval", "3")
    for world_size, flags in LAYOUTS.values():
        moved = run(world_size, kind, *FP64, *DROPOUT, *flags, "--load", str(tmp_path), "--ckpt-step", "3")
        for got, want in zip(moved.records, straight.records[3:], strict=True):
            assert got.loss == pytest.approx(want.loss, rel=1e-10)
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-10)


AXES = (
    (2, ("--mp-degree", "2", "--sequence-parallel")),
    (2, ("--ep-degree", "2", "--sharding-stage", "3")),
    (4, ("--sharding-degree", "4", "--sharding-stage", "2")),
    (1, ()),
    (4, ("--mp-degree", "4")),
    (4, ("--mp-degree", "2", "--sequence-parallel", "--expert-mp-degree", "1", "--ep-degree", "4")),
)
STAGES = (
    (2, ("--pp-degree", "2")),
    (2, ("--pp-degree", "2", "--pp-schedule", "interleaved", "--vpp-degree", "2")),
    (4, ("--pp-degree", "2", "--mp-degree", "2", "--sequence-parallel")),
    (1, ()),
    (2, ("--pp-degree", "2", "--pp-schedule", "zero_bubble", "--vpp-degree", "2")),
    (4, ("--pp-degree", "4", "--pp-seg-method", "balanced")),
    (4, ("--pp-degree", "2", "--pp-schedule", "gpipe", "--sharding-stage", "2")),
)
FOUR_LAYERS = ("--num-layers", "4", "--attention-dropout", "0", "--hidden-dropout", "0")


@pytest.mark.parametrize(
    ("kind", "model", "layouts"),
    [("moe", ("--num-query-groups", "4"), AXES), ("moe", FOUR_LAYERS, STAGES), ("ernie", FOUR_LAYERS, STAGES)],
    ids=["moe-axes", "moe-stages", "ernie-stages"],
)
def test_a_checkpoint_moves_from_layout_to_layout(kind: str, model: Flags, layouts: Any, tmp_path: Path) -> None:
    """One iteration on each layout, handed on by checkpoints: the losses are those of one process throughout."""
    flags, steps = (*FP64, *model), str(len(layouts))
    straight = run(1, kind, *flags, "--train-iters", steps)
    handed = (*flags, "--save", str(tmp_path), "--load", str(tmp_path), "--lr-decay-iters", steps)
    for number, (world_size, layout) in enumerate(layouts):
        (record,) = run(world_size, kind, *handed, "--train-iters", str(number + 1), *layout).records
        assert record.iteration == number + 1
        assert record.loss == pytest.approx(straight.records[number].loss, rel=1e-10)
        assert record.grad_norm == pytest.approx(straight.records[number].grad_norm, rel=1e-10)


def test_evaluation_is_the_same_on_every_layout() -> None:
    """Also with a number of held-out samples that no layout divides, in a smaller last micro-batch."""
    evaluate = (*FP64, "--train-iters", "1", "--eval-interval", "1", "--eval-iters", "3", "--micro-batch-size", "2")
    want = run(1, "ernie", *evaluate).evaluation
    assert want is not None
    for world_size, flags in (LAYOUTS["sharding 2"], LAYOUTS["sharding 4, stage 3"]):
        assert run(world_size, "ernie", *evaluate, *flags).evaluation == pytest.approx(want, rel=1e-10)


def test_evaluation_does_not_depend_on_the_size_of_micro_batches() -> None:
    """Documents end in some samples more often than in others, so that micro-batches differ in their labels."""
    flags = (*FP64, "--train-iters", "1", "--eval-interval", "1", "--eval-iters", "1")
    masked = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    flags = (*flags, *masked, "--moe-aux-loss-coeff", "0")  # balance is one micro-batch's by definition
    one, eight = (run(1, "moe", *flags, "--micro-batch-size", size).evaluation for size in "18")
    assert one == pytest.approx(eight, rel=1e-10)


def test_the_line_of_an_evaluation_is_printed_when_it_was_made(tmp_path: Path) -> None:
    order: list[object] = []
    evaluate = Trainer._evaluate
    with (
        patch.object(Trainer, "_evaluate", lambda trainer: order.append("evaluated") or evaluate(trainer)),
        patch.object(PlainTerminal, "log", lambda terminal, record: order.append((record.iteration, record.eval_loss))),
    ):
        run_here(tmp_path, "--eval-interval", "4", "--eval-iters", "1", "--save-interval", "100")
    told = [one if one == "evaluated" else one[0] for one in order]  # type: ignore[index]
    assert told == [1, 2, 3, "evaluated", 4, 5, "evaluated", 6]


def test_evaluation_drops_the_same_where_held_out_samples_fill_no_micro_batch(tmp_path: Path) -> None:
    """With a capacity ranks exchange what theirs allows: in a round, micro-batches are of one size on every rank."""
    five = write_tokens(tmp_path / "five", [[(7 * place) % 89 + 5 for place in range(5 * 16 + 1)]])
    own = ("--data-path", five, "--eval-data-path", five)
    few = ("--train-iters", "1", "--eval-interval", "1", "--micro-batch-size", "2", "--moe-capacity-factor", "0.5")
    drops = (*FP64, *own, *few, "--moe-model-type", "deepspeed_moe")
    want = run(1, "moe", *drops).evaluation
    assert want is not None
    for world_size, layout in ((2, ("--ep-degree", "2")), (4, ("--ep-degree", "4", "--sharding-stage", "3"))):
        assert run(world_size, "moe", *drops, *layout).evaluation == pytest.approx(want, rel=1e-10)


def fails_to_evaluate(rank: int, world_size: int, rendezvous: str, flags: list[str]) -> None:
    """A run whose first evaluation raises."""
    wrong = patch("megapar.trainer.evaluate", side_effect=ValueError("a held-out sample is damaged"))
    with wrong, pytest.raises(ValueError, match="held-out"):
        train(parse("moe", flags, {}), f"file://{rendezvous}")


@pytest.mark.parametrize("failed_at", [2, 4])
def test_an_evaluation_that_fails_costs_no_step(failed_at: int, tmp_path: Path) -> None:
    """The checkpoint of the step is there, also of the last one, its record is written once, and a restart goes on."""
    folder, metrics = tmp_path / "c", tmp_path / "metrics.jsonl"
    files = ("--save", str(folder), "--load", str(folder), "--metrics-jsonl", str(metrics))
    flags = (*FP64, *files, "--save-interval", "2", "--eval-interval", str(failed_at), "--train-iters", "4")
    run_ranks(1, fails_to_evaluate, last_wins((*SMALL["moe"], *COMMON), flags), group=False)
    assert (folder / "latest").read_text().split()[0] == f"iter_{failed_at:07d}"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(line["iteration"], "eval_loss" in line) for line in lines] == [(n + 1, False) for n in range(failed_at)]
    resumed = run(1, "moe", *flags)
    assert [record.iteration for record in resumed.records] == [*range(failed_at + 1, 5)]
    assert resumed.evaluation is not None


def test_parts_of_a_checkpoint_can_be_left_out(tmp_path: Path) -> None:
    base = (*FP64, *DROPOUT)
    straight = run(1, "moe", *base, "--save", str(tmp_path), "--save-interval", "3")
    load = (*base, "--load", str(tmp_path), "--ckpt-step", "3")
    tuned = run(1, "moe", *load, "--finetune")
    assert [r.iteration for r in tuned.records] == [1, 2, 3, 4, 5, 6]
    assert tuned.records[0].loss < straight.records[0].loss
    fresh = run(1, "moe", *load, "--no-load-optim")
    assert fresh.records[0].loss == straight.records[3].loss
    assert fresh.records[1].loss != straight.records[4].loss
    seed = ("--seed", "99", "--override-data", "seed")
    other = run(1, "moe", *load, "--no-load-rng", *seed)
    same = run(1, "moe", *load, *seed)
    assert other.records[0].loss != same.records[0].loss


def test_another_schedule_is_refused_unless_it_is_wanted(tmp_path: Path) -> None:
    run(1, "moe", *FP64, "--save", str(tmp_path), "--save-interval", "3")
    load = (*FP64, "--load", str(tmp_path), "--ckpt-step", "3", "--lr", "5e-3")
    with pytest.raises(RanksFailed, match=r"--lr is 0.01 there and 0.005 here.*--override-opt-param-scheduler"):
        run(1, "moe", *load)
    assert run(1, "moe", *load, "--override-opt-param-scheduler").records[0].lr < 5e-3


def test_every_iteration_is_an_object_of_the_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    board = tmp_path / "board"
    outcome = run(
        *(2, "moe", "--sharding-degree", "2", "--metrics-jsonl", str(path), "--tensorboard-dir", str(board)),
        *("--eval-interval", "3", "--eval-iters", "1", "--log-interval", "4"),
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["iteration"] for line in lines if "eval_loss" in line and "eval_lm_loss" in line] == [3, 6]
    assert lines[-1]["consumed_samples"] == 48
    assert lines[-1]["mfu_peak"] == "measured"  # no CPU stands in the table
    assert lines[-1]["consumed_tokens"] == 48 * 16
    assert lines[-1]["predicted_tokens"] == 8 * 16
    assert lines[0].keys() >= {
        *("lm_loss", "sop_loss", "aux_loss", "z_loss", "loss", "grad_norm", "lr", "loss_scale", "skipped"),
        *("dropped_tokens", "iteration_seconds", "tokens_per_second", "model_tflops_per_device", "mfu", "mfu_peak"),
        *("peak_memory_bytes", "exposed_communication_seconds"),
    }
    times = [datetime.fromisoformat(line["time"]) for line in lines]
    assert all(time.tzinfo == timezone.utc for time in times)
    assert times == sorted(times)
    assert len(set(times)) > 1
    waited = lines[-1]["exposed_seconds"]
    assert {"shard/reduce_scatter", "shard/all_gather"} & set(waited)
    assert sum(waited.values()) == pytest.approx(lines[-1]["exposed_communication_seconds"])
    assert outcome.records[-1].loss == lines[-1]["loss"]
    assert list(board.glob("events*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("beyond", "tokens.bin was overwritten while it was mapped"),  # ids that the vocabulary lacks
        ("other", "tokens.bin was overwritten while it was mapped"),  # of another length, found by the save
        ("replaced", ""),
    ],
)
def test_tokens_that_are_overwritten_under_a_run_are_named(tmp_path: Path, change: str, said: str) -> None:
    prefix = tmp_path / "tokens"
    write_tokens(prefix, ([(7 * number + i) % 100 for i in range(60)] for number in range(40)))
    data, step = Path(f"{prefix}.bin"), Trainer.step

    def change_data(trainer: Trainer) -> object:
        if trainer.progress.iteration == 2:
            content = data.read_bytes()
            if change == "replaced":
                data.unlink()
            with data.open("r+b" if data.exists() else "xb") as file:
                file.write(b"\xfa" * len(content) if change == "beyond" else content + b"\0\0")
        return step(trainer)

    flags = ("--data-path", str(prefix), "--split", "100,0")
    with patch.object(Trainer, "step", change_data):
        if said:
            with pytest.raises(DataError, match=said):
                run_here(tmp_path / "c", *flags)
        else:
            assert run_here(tmp_path / "c", *flags).iteration == 6
    assert sorted(path.name for path in (tmp_path / "c").glob("iter_*"))[0] == "iter_0000002"


def test_an_export_loads_in_transformers_from_any_layout(tmp_path: Path) -> None:
    logits = []
    for name, (world_size, flags) in {**LAYOUTS, "pp 2": (2, ("--pp-degree", "2"))}.items():
        folder = tmp_path / name
        run(world_size, "moe", *flags, "--train-iters", "1", "--save-hf", str(folder), "--dtype", "fp32")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(torch.arange(10, 20).unsqueeze(0)).logits)
    for other in logits[1:]:
        assert torch.allclose(other, logits[0], atol=1e-5)


def test_an_export_of_a_vocabulary_that_is_cut_unevenly_twice(tmp_path: Path) -> None:
    """Over mp into 9 and 8 rows, of which stage 3 cuts the first evenly over 3 ranks and pads the second."""
    flags = ("--vocab-size", "17", "--hidden-size", "64", "--num-query-groups", "2", "--save-hf")
    shard = ("--mp-degree", "2", "--sharding-degree", "3", "--sharding-stage", "3", "--global-batch-size", "12")
    common = ("--train-iters", "1", "--micro-batch-size", "2", "--dtype", "fp64", *flags)
    run(1, "moe", "--global-batch-size", "12", *common, str(tmp_path / "one"))
    run(6, "moe", *shard, *common, str(tmp_path / "six"))
    one, six = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "six"))
    assert one.keys() == six.keys()
    for name, tensor in one.items():
        assert torch.allclose(six[name], tensor, rtol=0, atol=1e-6), name


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(RanksFailed, match=r"TrainingError: iteration [0-9]+: gradient norm (nan|inf)"):
        run(1, "moe", "--lr", "1e30", "--clip-grad", "0", "--dtype", "fp32")


def held_by_a_run(rank: int, world_size: int, rendezvous: str) -> tuple[int, int, int]:
    """Bytes of this process' objects after steps 20 and 60, and the records that are left at the end."""
    held: dict[int, int] = {}
    step = Trainer.step
    gc.unfreeze()  # what an imported module collects counts, too

    def counted(self: Trainer) -> object:
        done = step(self)
        if self.progress.iteration in (20, 60):  # behind what is made once
            held[self.progress.iteration] = object_bytes()
        return done

    flags = last_wins((*SMALL["moe"], *COMMON), ("--train-iters", "61", "--log-interval", "10"))
    try:
        with (
            patch.object(Trainer, "step", counted),
            patch.object(numbers, "WINDOW", 10),  # full before the first count, as the next one
            patch.object(time_left, "STEPS", 10),
        ):
            outcome = train(parse("moe", flags, {}))
    finally:
        gc.collect()
        gc.freeze()
    return held[20], held[60], len(outcome.records)


def test_nothing_of_a_step_is_kept_for_the_life_of_a_run() -> None:
    """Counted in a rank, which has a fraction of the objects of a process of tests."""
    first, last, records = run_ranks(1, held_by_a_run, timeout=180, group=False)[0]
    assert records == 0
    assert last - first < 40 * 48  # two floats of every step; a record has thousands of bytes


def test_flops_of_a_device_are_its_share_of_all_ranks() -> None:
    each = {
        ranks: run(ranks, "moe", "--sharding-degree", str(ranks), "--device-tflops", "0.5").records for ranks in (1, 2)
    }
    for record in (*each[1], *each[2]):
        assert record.tokens_per_second == pytest.approx(8 * 16 / record.iteration_seconds)
        assert record.mfu == pytest.approx(record.model_tflops_per_device / 0.5)
    whole, halves = (
        [record.model_tflops_per_device * ranks / record.tokens_per_second for record in records]
        for ranks, records in each.items()
    )
    assert whole == pytest.approx(halves, rel=1e-12)


def test_what_is_logged_does_not_depend_on_the_log_interval() -> None:
    flags = ("--sharding-degree", "4", "--dtype", "fp64")
    each, together = (run(4, "moe", *flags, "--log-interval", interval).records for interval in ("1", "100"))
    assert [record.lm_loss for record in each] == [record.lm_loss for record in together]


def test_an_error_of_a_callback_that_closes_keeps_nothing_open() -> None:
    class Failing(TrainerCallback):
        def close(self) -> None:
            raise OSError("cannot close")

    flags = [*SMALL["moe"], *COMMON, "--train-iters", "1", "--manual-gc", "--data-path", "mock"]
    with pytest.raises(OSError, match="cannot close"):
        train(parse("moe", flags, {}), callbacks=[Failing()])
    assert gc.isenabled()
    assert not any(thread.name.startswith("megapar-loader") for thread in threading.enumerate())


class Enough(TrainerCallback):
    """Asks for a stop on one rank, after a step's loss is known."""

    def __init__(self, asks: bool) -> None:
        self.asks, self.losses = asks, list[float]()

    def begin(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def logged(self, record: Record) -> None:
        self.losses.append(record.loss)
        if self.asks and record.iteration == 2:
            self.trainer.stop("the loss is low enough")


def stop_by_callback(rank: int, world_size: int, rendezvous: str, root: str) -> tuple[int, str, list[float], int]:
    flags = last_wins((*SMALL["moe"], *COMMON), ("--train-iters", "9", "--log-interval", "1", "--save", root))
    line = [*flags, "--sharding-degree", "2", "--data-path", "mock"]
    enough = Enough(asks=rank == 1)
    with patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        config = parse("moe", line, dict(os.environ))
        outcome = train(config, f"file://{rendezvous}", callbacks=[enough], keep_records=True)
    weights = sum(weight.numel() for weight in outcome.model.parameters())
    assert [record.loss for record in outcome.records] == enough.losses
    return outcome.iteration, outcome.stopped, enough.losses, weights


def test_a_callback_of_one_rank_stops_all_in_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, stop_by_callback, str(tmp_path / "runs"), group=False)
    assert (first[0], second[0]) == (3, 3)
    assert (first[1], second[1]) == ("a callback of another rank asked for it", "the loss is low enough")
    assert first[2] == second[2]
    assert first[3] > 0
    assert (tmp_path / "runs" / "iter_0000003").is_dir()


def test_versions_and_flags_are_printed_before_the_data_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse("moe", [*SMALL["moe"], "--data-path", "mock", "--train-iters", "1"], {})
    with patch("megapar.trainer.make_corpus", side_effect=DataError("broken")):
        for quiet, rank in ((False, "0"), (True, "0"), (False, "1")):
            with patch.dict(os.environ, {"RANK": rank}), pytest.raises(DataError, match="broken"):
                train(config, quiet=quiet)
            lines = capsys.readouterr().out.splitlines()
            assert [line.split()[0] for line in lines[:2]] == ([] if quiet or rank == "1" else ["megapar", "flags:"])


def test_data_that_the_start_cannot_use_ends_it_like_a_refusal_and_a_disk_that_fails_does_not() -> None:
    config = parse("moe", [*SMALL["moe"], "--data-path", "mock", "--train-iters", "1"], {})
    for cause, status in ((None, 2), (FileNotFoundError(), 2), (OSError("stale handle"), 1)):
        error = DataError("broken")
        error.__cause__ = cause
        with patch("megapar.trainer.make_corpus", side_effect=error), pytest.raises(DataError) as ended:
            train(config, quiet=True)
        assert ended.value.exit_status == status


def test_a_quiet_run_prints_nothing_and_keeps_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[int] = []

    class Heard(Logger):
        def log(self, record: Record) -> None:
            heard.append(record.iteration)

    flags = [*SMALL["moe"], *COMMON, "--train-iters", "2", "--data-path", "mock", "--log-interval", "1"]
    config = parse("moe", [*flags, "--metrics-jsonl", str(tmp_path / "metrics.jsonl")], {})
    assert train(config, quiet=True, loggers=[Heard()]).stopped == ""
    assert capsys.readouterr().out == ""
    assert heard == [1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (tmp_path / "run.json").exists()


def test_what_is_no_configuration_is_named() -> None:
    with pytest.raises(TypeError, match="train takes what parse returns, not str"):
        train("my.yaml")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (object(), "not a object"),
        (TrainerCallback, "not the class TrainerCallback"),
        (type("Mine", (TrainerCallback,), {"on_step_end": print})(), "Mine.on_step_end is never called; .* after_step"),
    ],
)
def test_what_is_no_callback_is_named_before_a_model_is_made(callback: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        train(parse("moe", {"config": "tiny"}), callbacks=[callback])


def test_the_bar_of_a_terminal_moves_with_every_step(tmp_path: Path) -> None:
    """Between lines of the log, too, and with the time of evaluations and saves."""
    seen: list[Any] = []

    class Bar(ProgressTerminal):
        def stepped(self, iteration: int) -> None:
            super().stepped(iteration)
            (task,) = self._progress.tasks
            seen.append((task.completed, str(task.fields["left"]) != "-"))

        def paused(self, name: str, seconds: float) -> None:
            super().paused(name, seconds)
            seen.append((name, seconds > 0))

    flags = ("--log-interval", "100", "--eval-interval", "3", "--eval-iters", "1", "--save-interval", "4")
    with (
        patch("sys.stdout.isatty", return_value=True, create=True),
        patch("megapar.training.reports.terminal.ProgressTerminal", Bar),
    ):
        run_here(tmp_path, *flags)
    evaluated, saved = ("evaluation", True), ("save", True)
    assert seen == [
        *((1, False), (2, True), (3, True), evaluated, (4, True), saved, (5, True)),
        *((6, False), saved, evaluated, saved),  # the last one waits for the files
    ]
