"""QK-clip against scores and factors by hand on one process; variants that count other rows must fail the same test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.row_statistic import Rows, RowStatistic
from megapar.model.attention.self_attention import SelfAttention
from megapar.model.decoder.model import Decoder
from megapar.trainer import Outcome, Trainer
from megapar.training.reports.terminal import describe
from megapar.training.step.qk_clip import QkClip
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, last_wins, make_trainer, train_rank

LAYERS, HEADS = 2, 4
SIZES = (
    *("--num-layers", str(LAYERS), "--hidden-size", "32", "--num-attention-heads", str(HEADS)),
    *("--ffn-hidden-size", "48", "--seq-length", "16", "--vocab-size", "101", "--num-experts", "0"),
    *("--init-std", "0.15", "--mtp-depth", "1", "--dtype", "fp64", "--global-batch-size", "4"),
    *("--micro-batch-size", "2", "--lr-decay-iters", "6"),
)
GROUPED = ("--num-query-groups", "2", "--add-qkv-bias")
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "18", "--kv-lora-rank", "11", "--qk-head-dim", "6"),
    *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "9"),
)
PLAIN_DIM, GROUP = 6, 2  # features of a latent head that are not rotated; query heads of a group
PADDED = ("--no-packing",)
WINDOW = ("--window-size", "3", "--window-attn-skip-freq", "[1,0,1]")  # the second layer sees all keys
DOCUMENTS = ("--reset-position-ids", "--reset-attention-mask")
BY_MAXIMUM = ("--qk-clip-statistic", "max", "--no-use-flash-attn")

Seen = list[tuple[str, Tensor]]  # of each call of attention: its name, and each row's scores [B, N, S, L], -inf unseen


@contextmanager
def ready(*flags: str) -> Iterator[Trainer]:
    trainer = make_trainer("moe", [*last_wins(COMMON, SIZES), *flags])
    try:
        yield trainer
    finally:
        trainer.loader.close()
        trainer.watch.close()
        trainer.world.close()


def masters(trainer: Trainer) -> dict[str, Tensor]:
    sharding = trainer.job.sharding
    views = sharding.views([shard.master for shard in sharding.master_shards])
    return {view.spec.name: view.tensor.clone() for view in views}


def scores_by_hand(q: Tensor, k: Tensor, context: Any, window: int) -> Tensor:
    """q [B, S, N, D], k [B, S, G, D] -> scores [B, N, S, S], -inf where a row does not see a key or does not count.

    window: The most keys of a row; 0 for any number.
    """
    B, S, N, D = q.shape
    k = k.repeat_interleave(N // k.shape[2], dim=2)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * D**-0.5
    for b in range(B):
        ends = (S,) if context.mask.host.ends is None else context.mask.host.ends[b]
        for row in range(S):
            start = max((end for end in ends if end <= row), default=0)
            start = max(start, row + 1 - window) if window else start
            scores[b, :, row, :start] = scores[b, :, row, row + 1 :] = -math.inf
            if context.own_valid is not None and not context.own_valid[b, row]:
                scores[b, :, row] = -math.inf
    return scores


def recorded(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record the scores of each call of attention from here on."""
    seen: Seen = []
    core = SelfAttention.core

    def recording(self: SelfAttention, q: Tensor, k: Tensor, v: Tensor, context: Any, more: Any = ()) -> Tensor:
        layer = int(self.place.split(".")[1])
        name = f"layers.{layer}.attention" if layer < LAYERS else "mtp.block.attention"
        if self.training:
            seen.append((name, scores_by_hand(q.detach(), k.detach(), context, self.sizes.window)))
        return core(self, q, k, v, context, more)

    monkeypatch.setattr(SelfAttention, "core", recording)
    return seen


def largest(seen: Seen, *, by_maximum: bool) -> dict[str, list[float]]:
    """The largest statistic of each head over all calls."""
    found: dict[str, list[float]] = {}
    for name, scores in seen:
        rows = scores.amax(-1) if by_maximum else scores.logsumexp(-1)
        now = [float(rows[:, head].max()) for head in range(HEADS)]
        before = found.get(name, now)
        found[name] = [max(pair) for pair in zip(before, now, strict=True)]
    return found


def clipped(values: dict[str, Tensor], statistics: dict[str, list[float]], threshold: float) -> dict[str, Tensor]:
    """The masters with each head's weights scaled, head by head."""
    values = {name: value.clone() for name, value in values.items()}
    for name, heads in statistics.items():
        for head, statistic in enumerate(heads):
            factor = min(1.0, threshold / statistic) if statistic > 0 else 1.0
            if f"{name}.qkv.weight" in values:
                for part in ("weight", "bias"):
                    values[f"{name}.qkv.{part}"][head // GROUP, head % GROUP] *= factor
            else:
                values[f"{name}.q_up.weight"][head, :PLAIN_DIM] *= math.sqrt(factor)
                values[f"{name}.q_up.weight"][head, PLAIN_DIM:] *= factor
                values[f"{name}.kv_up.weight"][head, :PLAIN_DIM] *= math.sqrt(factor)
    return values


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of a master, relative to the largest of its tensor."""
    assert got.keys() == want.keys()
    return max(float((got[name] - b).abs().max() / b.abs().max().clamp_min(1e-30)) for name, b in want.items())


def a_step(monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[float, float, int]:
    """Return how far a clipped step is from that by hand, how far an unclipped one is, and how many heads it clips.

    The threshold lies between the statistics of the heads.
    """
    with monkeypatch.context() as patched, ready(*(f for f in flags if f not in BY_MAXIMUM[:2])) as trainer:
        seen = recorded(patched)
        trainer.step()
        before = masters(trainer)
    statistics = largest(seen, by_maximum=BY_MAXIMUM[1] in flags)
    every = sorted(statistic for heads in statistics.values() for statistic in heads)
    threshold = every[len(every) // 2] - 1e-6
    with ready(*flags, "--qk-clip-threshold", repr(threshold)) as trainer:
        trainer.step()
        got = masters(trainer)
    want = clipped(before, statistics, threshold)
    return apart(got, want), apart(got, before), sum(statistic > threshold for statistic in every)


CASES = {
    "grouped": GROUPED,
    "latent": LATENT,
    "grouped, padding": (*GROUPED, *PADDED),
    "latent, documents": (*LATENT, *DOCUMENTS),
    "grouped, maximum": (*GROUPED, *PADDED, *BY_MAXIMUM),
    "latent, maximum": (*LATENT, *DOCUMENTS, *BY_MAXIMUM),
    "grouped, recomputed": (*GROUPED, *PADDED, "--recompute-interval", "1"),
    "latent, core recomputed": (*LATENT, *DOCUMENTS, "--recompute-granularity", "selective"),
    "grouped, sgd": (*GROUPED, "--optimizer", "sgd"),
    "latent, muon": (*LATENT, "--optimizer", "muon"),
    "grouped, window, padding": (*GROUPED, *WINDOW, *PADDED),
    "grouped, window, documents": (*GROUPED, *WINDOW, *DOCUMENTS, "--recompute-granularity", "selective"),
    "grouped, window, maximum": (*GROUPED, *WINDOW, *DOCUMENTS, *BY_MAXIMUM),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_scores_and_factors_by_hand(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers and multi-token prediction: heads above the threshold are scaled, all else is as without."""
    wrong, moved, heads = a_step(monkeypatch, *CASES[case])
    assert wrong < 1e-12
    assert moved > 1e-4
    assert 0 < heads < (LAYERS + 1) * HEADS


def last_call_alone(self: RowStatistic, rows: Tensor) -> None:
    """Broken: the statistic is that of the last micro-batch."""
    if self.counted is not None:
        rows = rows.masked_fill(~self.counted[:, None], -torch.inf)
    self.largest.copy_(rows.amax((0, 2)))


def test_a_maximum_of_one_micro_batch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowStatistic, "_see", last_call_alone)
    wrong, _, _ = a_step(monkeypatch, *GROUPED)
    assert wrong > 1e-6


def test_counted_padding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(self: SelfAttention, *_: object) -> RowStatistic | None:
        return self.row_statistic

    monkeypatch.setattr(SelfAttention, "rows", everything)
    wrong, _, _ = a_step(monkeypatch, *GROUPED, *PADDED)
    assert wrong > 1e-6


@pytest.mark.parametrize("more", [(), DOCUMENTS])
def test_keys_before_a_window_fail(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    attend = SelfAttention.attend

    def everything(
        self: SelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: DeviceMask, dropout: float, rows: Rows = None
    ) -> Tensor:
        if rows is not None:
            attend(self, q, k, v, DeviceMask.of(replace(mask.host, window=None), q.device), dropout, rows)
        return attend(self, q, k, v, mask, dropout, rows)

    monkeypatch.setattr(SelfAttention, "attend", everything)
    wrong, _, _ = a_step(monkeypatch, *GROUPED, *WINDOW, *more)
    assert wrong > 1e-6


def without_gradients(trainer: Trainer) -> None:
    """Make a gradient of the next steps infinite."""
    finish = trainer.job.sharding.finish

    def spoiled() -> None:
        finish()
        grad = trainer.job.sharding.master_shards[0].grad
        assert grad is not None
        grad.fill_(math.inf)

    trainer.job.sharding.finish = spoiled  # type: ignore[method-assign]


def after_a_bad_step(change: Callable[[Trainer], None]) -> tuple[bool, float]:
    """Return whether a step with infinite gradients was skipped, and how far its masters are from those before."""
    with ready(*GROUPED, "--qk-clip-threshold", "1") as trainer:
        without_gradients(trainer)
        change(trainer)
        before = masters(trainer)
        skipped = trainer.step().skipped
        return skipped, apart(masters(trainer), before)


def test_a_skipped_step_clips_nothing() -> None:
    assert after_a_bad_step(lambda _: None) == (True, 0.0)


def test_clipping_before_the_verdict_fails() -> None:
    def broken(trainer: Trainer) -> None:
        clip = trainer.job.qk_clip
        assert clip is not None
        take = clip.take

        def at_once() -> Tensor:
            found = take()
            clip.clip(found, None)
            return found

        clip.take = at_once  # type: ignore[method-assign]

    skipped, moved = after_a_bad_step(broken)
    assert skipped
    assert moved > 0.1


def test_a_device_that_skips_the_update_skips_the_clip() -> None:
    with ready(*GROUPED, "--qk-clip-threshold", "1") as trainer:
        clip, before = trainer.job.qk_clip, masters(trainer)
        assert isinstance(clip, QkClip)
        scores = torch.full((LAYERS + 1, HEADS), 4.0, dtype=torch.float64)
        clip.clip(scores, torch.tensor(1.0))
        assert apart(masters(trainer), before) == 0.0
        clip.clip(scores, torch.tensor(0.0))
        want = {f"{name}.attention": [4.0] * HEADS for name in ("layers.0", "layers.1", "mtp.block")}
        assert apart(masters(trainer), clipped(before, want, 1.0)) < 1e-14


def test_nothing_is_collected_between_steps() -> None:
    """An evaluation, and the runs of a check, happen there."""
    with ready(*GROUPED, "--qk-clip-threshold", "1") as trainer:
        trainer.step()
        assert isinstance(trainer.job.model, Decoder)
        assert all(attention.row_statistic is None for attention in trainer.job.model.attentions().values())


def test_a_step_has_the_largest_score_and_the_number_of_clipped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, ready(*GROUPED, "--qk-clip-threshold", "3.2") as trainer:
        seen = recorded(patched)
        scores = trainer.step().update.scores
    every = [statistic for heads in largest(seen, by_maximum=False).values() for statistic in heads]
    assert scores is not None
    assert scores.tolist() == pytest.approx([max(every), sum(statistic > 3.2 for statistic in every)], rel=1e-12)


def logged(ranks: int, *flags: str) -> Outcome:
    """Return the outcome of a run."""
    outcome = run_ranks(ranks, train_rank, "moe", last_wins(COMMON, (*SIZES, *GROUPED, *flags)), group=False)[0]
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(4, ("--mp-degree", "2", "--pp-degree", "2")), (2, ("--cp-degree", "2", "--sharding-stage", "2"))],
)
def test_every_layout_logs_the_scores_of_one_process(ranks: int, layout: tuple[str, ...]) -> None:
    flags = ("--qk-clip-threshold", "3.2")
    whole, cut = (logged(count, *flags, *more) for count, more in ((1, ()), (ranks, layout)))
    for one, other in zip(whole.records, cut.records, strict=True):
        assert one.qk_clip_largest is not None
        assert other.qk_clip_largest == pytest.approx(one.qk_clip_largest, rel=1e-10)
        assert other.qk_clipped_heads == one.qk_clipped_heads
    assert 0 < (whole.records[0].qk_clipped_heads or 0) <= (LAYERS + 1) * HEADS
    assert f"{whole.records[-1].qk_clipped_heads} heads clipped" in describe(whole.records[-1], 6)
    assert whole.records[0].to_dict()["qk_clip_largest"] == whole.records[0].scalars()["optimizer/qk_clip_largest"]


def test_a_run_without_it_logs_no_scores() -> None:
    (record, *_) = logged(1, "--train-iters", "1").records
    assert "qk_clip_largest" not in record.to_dict()
    assert "heads clipped" not in describe(record, 1)
