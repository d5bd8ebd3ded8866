"""Norms of updates by class of tensors: against masters before and after, alike on every layout and in every log."""

from __future__ import annotations

import json

import pytest
import torch

from megapar.arguments import parse
from megapar.model.spec import table_of
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.training.step.update_norms import TENSOR_CLASSES, class_of
from tests.model.small import ERNIE, MOE
from tests.support.training import COMMON, SMALL, last_wins, make_trainer, run

NORMS = ("--log-update-norms", "--log-interval", "2", "--dtype", "fp64", "--untie-embeddings-and-output-weights")


def masters(trainer):  # type: ignore[no-untyped-def]
    sharding = trainer.job.sharding
    views = sharding.views([shard.master for shard in sharding.master_shards])
    return {view.spec.name: (view.spec, view.tensor.clone()) for view in views}


def test_norms_are_those_of_masters_before_and_after() -> None:
    trainer = make_trainer("moe", last_wins((*SMALL["moe"], *COMMON), (*NORMS, "--log-interval", "1")))
    before = masters(trainer)
    norms = trainer.step().update.norms
    after = masters(trainer)
    for row, name in zip(norms.tolist(), TENSOR_CLASSES, strict=True):
        members = [key for key, (spec, _) in after.items() if class_of(spec) == name]
        moved = torch.cat([(after[key][1] - before[key][1]).flatten() for key in members])
        weights = torch.cat([after[key][1].flatten() for key in members])
        assert row == pytest.approx([moved.norm().item(), weights.norm().item()], rel=1e-12)
        assert members
    trainer.loader.close()
    trainer.watch.close()
    trainer.world.close()


def test_masters_in_two_parts_have_the_norms_of_whole_ones() -> None:
    flags = ("--log-update-norms", "--log-interval", "1", "--dtype", "bf16", "--train-iters", "1")
    whole, split = (run(1, "moe", *flags, *more).records[0] for more in ((), ("--store-param-remainders",)))
    assert split.weight_norms == pytest.approx(whole.weight_norms, rel=1e-3)
    assert split.update_norms == pytest.approx(whole.update_norms, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, ("--mp-degree", "2", "--sequence-parallel", "--ep-degree", "2", "--sharding-stage", "2")),
        (2, ("--sharding-stage", "3", "--ep-degree", "2")),
        (4, ("--pp-degree", "2", "--sharding-degree", "2", "--optimizer", "muon")),
    ],
)
def test_every_layout_has_the_norms_of_one_process(ranks: int, layout: tuple[str, ...]) -> None:
    optimizer = layout[-2:] if layout[-2] == "--optimizer" else ()
    whole, cut = (run(count, "moe", *NORMS, *flags) for count, flags in ((1, optimizer), (ranks, layout)))
    for one, other in zip(whole.records, cut.records, strict=True):
        assert list(one.update_norms) == (list(TENSOR_CLASSES) if one.iteration % 2 == 0 else [])
        assert other.update_norms == pytest.approx(one.update_norms, rel=1e-9)
        assert other.weight_norms == pytest.approx(one.weight_norms, rel=1e-9)


def test_each_parameter_has_one_class() -> None:
    classes = {spec.name: class_of(spec) for spec in (*table_of(MOE), *table_of(ERNIE)) if spec.trainable}
    assert set(classes.values()) == set(TENSOR_CLASSES)
    assert {name for name in classes if classes[name] == "head" and "bias" in name} == set()


def test_the_metrics_file_has_them_in_logged_steps(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run(1, "moe", *NORMS, "--metrics-jsonl", str(tmp_path / "metrics.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["update_norms" in line for line in lines] == [line["iteration"] % 2 == 0 for line in lines]
    assert set(lines[1]["weight_norms"]) == set(TENSOR_CLASSES)


def test_the_plan_has_the_copy_of_the_masters() -> None:
    sizes = (
        *("--num-layers", "4", "--hidden-size", "4096", "--num-attention-heads", "32", "--num-experts", "0"),
        *("--seq-length", "8", "--vocab-size", "32000", "--dtype", "bf16", "--data-path", "mock"),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--sharding-stage", "1"),
    )
    config = parse("moe", sizes, {})
    parameters = sum(spec.numel for spec in table_of(config.model))
    plain, more = (
        Plan(parse("moe", [*sizes, *norms], {}), device_kind("h100-80g")).memory[0]
        for norms in ((), ("--log-update-norms",))
    )
    assert more.moment == "update"
    assert 0 < more.peak - plain.peak <= 4 * parameters
