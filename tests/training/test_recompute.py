"""Recompute in whole training steps: bit for bit what is computed without it, dropout and all; adaptive recompute."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _pytest.mark import ParameterSet

from megapar import trainer
from megapar.arguments import parse
from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.base import Device
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.recompute.adaptive import Adaptive
from megapar.core.units import MEGABYTE
from megapar.errors import TrainingError
from megapar.model.layers.context import Context
from megapar.model.layers.rotary import RotaryEmbedding
from megapar.tools.tracing.pretend import pretend
from tests.equivalence.run import Trace, trace
from tests.equivalence.table import COMMON, MODELS
from tests.support.pairwise import pairwise
from tests.support.ranks import run_ranks
from tests.support.training import make_trainer, run

DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
BATCH = ("--micro-batch-size", "2", "--global-batch-size", "8", "--dtype", "fp32")
# Two micro-batches on every data rank: as many as two stages have in flight.
FEWER = ("--global-batch-size", "4")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, FEWER),
    "mp": (2, ("--mp-degree", "2", *FEWER)),
    "sp": (2, ("--mp-degree", "2", "--sequence-parallel", *FEWER)),
    "ep": (2, ("--ep-degree", "2")),
    "stage 2": (2, ("--sharding-stage", "2")),
    "stage 3": (2, ("--sharding-stage", "3")),
    # Three layers on a stage, so that units of two and of all layers differ.
    "pp": (2, ("--pp-degree", "2", "--num-layers", "6", *FEWER)),
    "mp x pp": (4, ("--mp-degree", "2", "--pp-degree", "2", "--num-layers", "6", *FEWER)),
}
DROPS = ("--moe-model-type", "deepspeed_moe", "--moe-capacity-factor", "0.75", "--moe-min-capacity", "1")


@functools.cache
def train(kind: str, layout: str, *flags: str) -> Trace:
    """Two steps of a small model of four layers, six where there are stages."""
    world_size, more = LAYOUTS[layout]
    line = (*MODELS[kind], *COMMON, *BATCH, *DROPOUT, "--num-layers", "4", *more, *flags)  # the last of a name counts
    return run_ranks(world_size, trace, "ernie" if kind == "ernie" else "moe", line, 2, None, "late", group=False)[0]


def assert_same(got: Trace, want: Trace) -> None:
    """Loss, norm, every gradient and every parameter, bit for bit."""
    assert got.losses == want.losses
    assert got.norms == want.norms
    assert got.dropped == want.dropped
    for mine, theirs in zip(got.gradients, want.gradients, strict=True):
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    assert [name for name, value in want.parameters.items() if not torch.equal(got.parameters[name], value)] == []


KEPT = {
    "whole": (),
    "offload": ("--recompute-offload",),
    "partition": ("--recompute-partition",),
    "both": ("--recompute-offload", "--recompute-partition"),
}
ALL = 6
# Every model, mp 1 and 2 with pp 1 and 2, size of the units, and way to keep what they keep.
FACTORS = (("moe", "ernie"), ("alone", "mp", "pp", "mp x pp"), (1, 2, ALL), tuple(KEPT))


def _pieces_have_ranks(chosen: tuple[object, ...]) -> bool:
    return "mp" in str(chosen[1]) or chosen[3] in ("whole", "offload")


def _table() -> list[ParameterSet]:
    """The full product; what the covering set leaves out is run by ``-m table``."""
    covering = set(pairwise(FACTORS, _pieces_have_ranks))
    rows = [row for row in itertools.product(*FACTORS) if _pieces_have_ranks(row)]
    return [pytest.param(*row, marks=[] if row in covering else [pytest.mark.table]) for row in rows]


@pytest.mark.parametrize(("kind", "layout", "interval", "kept"), _table())
def test_interval(kind: str, layout: str, interval: int, kept: str) -> None:
    """Every layer kind of both models, experts that drop tokens included; what units keep comes back bit for bit."""
    drops = DROPS if kind == "moe" else ()
    got = train(kind, layout, *drops, "--recompute-interval", str(interval), *KEPT[kept])
    assert_same(got, train(kind, layout, *drops))


SELECTIVE = ("--recompute-granularity", "selective")
ELSEWHERE = [
    ("moe", "sp", 1, "offload"),
    ("moe", "sp", 2, "whole"),
    ("moe", "sp", ALL, "partition"),  # off with sequence parallelism
    ("moe", "ep", 1, "whole"),
    ("moe", "ep", 2, "offload"),
    ("moe", "stage 2", 2, "whole"),
    ("moe", "stage 3", 1, "offload"),
    ("moe", "stage 3", 2, "whole"),
    *(("ernie", layout, 3, "whole") for layout in ("alone", "mp", "sp", "stage 3")),
    *(("ernie", layout, 0, "whole") for layout in ("alone", "mp", "sp", "stage 3")),
    *(("moe", layout, 0, "whole") for layout in ("alone", "mp", "sp", "ep", "stage 2", "stage 3", "pp")),
]


@pytest.mark.parametrize(("kind", "layout", "interval", "kept"), ELSEWHERE)
def test_interval_elsewhere_and_selective(kind: str, layout: str, interval: int, kept: str) -> None:
    """Post-norm layers and attention that sees padding, too.

    An interval of 0 is selective: attention's core with its dropout, activation functions of dense layers and experts.
    """
    drops = DROPS if kind == "moe" else ()
    flags = ("--recompute-interval", str(interval), *KEPT[kept]) if interval else SELECTIVE
    assert_same(train(kind, layout, *drops, *flags), train(kind, layout, *drops))


@pytest.mark.parametrize("stage", ["1", "3"])
def test_bytes_and_drops_are_counted_once(stage: str) -> None:
    """What a recomputed forward sends, drops and routes is in no record."""
    layout = ("--ep-degree", "2", "--mp-degree", "2", "--sharding-stage", stage, *DROPS, "--train-iters", "3")
    plain, again = (run(4, "moe", *layout, *more) for more in ((), ("--recompute-interval", "1")))
    assert [record.loss for record in again.records] == [record.loss for record in plain.records]
    assert [record.sent_bytes for record in again.records] == [record.sent_bytes for record in plain.records]
    assert [record.dropped_tokens for record in again.records] == [record.dropped_tokens for record in plain.records]
    assert any(record.dropped_tokens for record in plain.records)


def test_resumed_runs_draw_the_same_masks(tmp_path: Path) -> None:
    """Streams are functions of the seed and the micro-batch: nothing but these is in a checkpoint."""
    flags = (*LAYOUTS["mp"][1], *DROPOUT, "--recompute-interval", "1")
    whole = run(2, "ernie", *flags)
    run(2, "ernie", *flags, "--train-iters", "3", "--lr-decay-iters", "6", "--save", str(tmp_path))
    resumed = run(2, "ernie", *flags, "--load", str(tmp_path))
    assert [record.loss for record in resumed.records] == [record.loss for record in whole.records[3:]]


@pytest.mark.parametrize("layout", ["pp", "ep", "stage 2", "stage 3"])
def test_masks_depend_on_no_layout_but_mp_and_cp(layout: str) -> None:
    flags = ("--dtype", "fp64", "--global-batch-size", "8", "--num-layers", "6")
    split, whole = train("moe", layout, *flags), train("moe", "alone", *flags)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert split.norms == pytest.approx(whole.norms, rel=1e-12)


def pretended(rank: int, world_size: int, rendezvous: str, *flags: str) -> dict[str, int]:
    """What rank 5 of 8 sends in a step, on fake tensors."""
    line = (*MODELS["gpt"], *COMMON, "--micro-batch-size", "1", "--mp-degree", "2", "--num-layers", "4", *flags)
    config = parse("moe", line, {"WORLD_SIZE": "8", "RANK": "5"})
    with pretend(config, 5) as trainer:
        return trainer.step().sent_bytes


def test_pretended_ranks_recompute() -> None:
    """The pieces of two units are gathered: two of four stay whole. Nothing else is sent more."""
    plain = run_ranks(1, pretended, group=False)[0]
    got = run_ranks(1, pretended, "--recompute-interval", "1", *KEPT["both"], group=False)[0]
    piece = 16 * 32 * 4 // 2
    assert got == plain | {"mp/all_gather": plain.get("mp/all_gather", 0) + 2 * piece}


ADAPTIVE = (*MODELS["moe"], *COMMON, "--micro-batch-size", "2", "--global-batch-size", "8", "--log-interval", "100")
PEAK = 1 << 29  # instead of this process' own, which depends on what ran before


def test_it_measures_what_a_layer_keeps() -> None:
    """What a recomputation leaves is what a forward leaves."""
    adapting = make_trainer("moe", [*ADAPTIVE, "--adaptive-recompute-device-size", "1024"])
    config = adapting.config
    adaptive = adapting.job.model.recompute.choice
    adapting.step()
    x = torch.randn(2, config.model.seq_length, config.model.hidden_size, requires_grad=True)
    mask = DeviceMask(AttentionMask(2, config.model.seq_length, causal=True))
    positions = torch.arange(config.model.seq_length).expand(2, -1)
    angles = RotaryEmbedding(config.model.head_dim, config.model.rope_theta, torch.float32).angles(positions)
    context = Context(mask, None, 2 * config.model.seq_length, {config.model.attention.rope: angles})
    for layer, block in enumerate(adapting.job.model.layers.values()):
        with MemoryTracker() as tracker:
            y, stats = block(x, context)
            outside = y.untyped_storage().nbytes()
            if stats is not None:
                outside += sum(
                    t.untyped_storage().nbytes() for t in stats if isinstance(t, torch.Tensor) and t.grad_fn is None
                )
            kept = tracker.bytes - outside
        assert adaptive._kept[layer] == pytest.approx(kept, rel=0.05)


def adapted(rank: int, world_size: int, rendezvous: str, megabytes: float | None) -> tuple[list[float], Any]:
    """(losses of six steps, the layers chosen)."""
    more = () if megabytes is None else ("--adaptive-recompute-device-size", str(megabytes), "--device", "cpu")
    chosen: list[Any] = []
    end_step = Adaptive.end_step

    def noted(adaptive: Adaptive, *args: Any) -> Any:
        result = end_step(adaptive, *args)
        if result is not None:
            chosen.append(result.layers)
        return result

    with (
        patch.object(Device, "peak_memory_bytes", lambda device: PEAK - rank),
        patch.object(Adaptive, "end_step", noted),
    ):
        line = [*ADAPTIVE, "--mp-degree", str(world_size), "--train-iters", "5", *more]
        outcome = trainer.train(parse("moe", line, dict(os.environ)), f"file://{rendezvous}", keep_records=True)
    return [record.loss for record in outcome.records], chosen


@functools.cache
def plain_losses() -> list[float]:
    """With nothing recomputed."""
    return run_ranks(2, adapted, None, group=False)[0][0]


@pytest.mark.parametrize(
    ("room", "layers"), [(0, (0, 1, 2)), (1 << 30, ())], ids=["for nothing more", "for everything"]
)
def test_runs(room: int, layers: tuple[int, ...]) -> None:
    """All ranks choose alike, once, and no loss changes."""
    got = run_ranks(2, adapted, (PEAK + room) / MEGABYTE, group=False)
    assert [chosen for _, chosen in got] == [[layers], [layers]]
    assert got[0][0] == plain_losses()


def test_too_little_is_said(tmp_path: Path) -> None:
    """With the memory it needs."""
    config = parse("moe", [*ADAPTIVE, "--adaptive-recompute-device-size", "1", "--device", "cpu"], {})
    with pytest.raises(TrainingError, match="with every layer recomputed the largest rank needs"):
        trainer.train(config)
