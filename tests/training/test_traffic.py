"""The bytes a step sends are those of the formulas, at every stage, in every merge mode and by both dispatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import pytest
from torch import Tensor

from megapar.arguments import parse
from megapar.core.sharding.cut import shard_dim
from megapar.model.parameter import ParameterSpec
from megapar.model.spec import table_of
from megapar.moe.dispatch_bytes import Sent, node_row_bytes, row_columns
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.training.step.observer import StepObserver
from tests.support.ranks import run_ranks
from tests.support.sent_rows import plain_rows, rows_by_node
from tests.support.training import COMMON, SMALL, last_wins, make_trainer, run

LAST = ("embedding", "head")  # tied, they are one group at stage 3, which stays gathered from forward to backward


def padded(specs: list[ParameterSpec], ranks: int) -> int:
    """Elements of all parameters, each padded so that sharding can cut it evenly."""
    total = 0
    for spec in specs:
        dim = shard_dim(spec.shape, ranks)
        rows = -(-spec.shape[dim] // ranks) * ranks
        total += prod(spec.shape) // spec.shape[dim] * rows
    return total


def specs(kind: str) -> tuple[list[ParameterSpec], list[ParameterSpec]]:
    """Trainable parameters: those of stage 3's last group, and the others."""
    rows = [spec for spec in table_of(parse(kind, [*SMALL[kind], *COMMON], {}).model) if spec.trainable]
    return [s for s in rows if s.unit in LAST], [s for s in rows if s.unit not in LAST]


def sent(world_size: int, kind: str, *flags: str) -> dict[str, int]:
    """By rank 0 in the third step."""
    return run(world_size, kind, "--train-iters", "4", *flags).records[2].sent_bytes


@pytest.mark.parametrize(
    ("stage", "mode"), [(1, "step"), (2, "step"), (2, "micro_batch"), (3, "step"), (3, "micro_batch")]
)
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_stages_reduce_in_the_main_dtype_and_gather_in_the_compute_dtype(stage: int, mode: str, dtype: str) -> None:
    """Stage 3 gathers twice in a micro-batch, but what is used last once."""
    flags = ("--sharding-degree", "2", "--sharding-stage", str(stage), "--gradient-merge-mode", mode)
    found = sent(2, "ernie", *flags, "--dtype", dtype, "--global-batch-size", "6")
    last, others = specs("ernie")
    elements = padded(last + others, 2)
    gathered = 3 * (2 * padded(others, 2) + padded(last, 2)) if stage == 3 else elements
    reductions = 3 if mode == "micro_batch" else 1
    main, compute = {"fp64": (8, 8), "bf16": (4, 2)}[dtype]
    assert found["shard/reduce_scatter"] == reductions * elements * main // 2
    assert found["shard/all_gather"] == gathered * compute // 2
    assert "replica/all_reduce" not in found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_sum_the_owned_shard_once(stage: int) -> None:
    flags = ("--sharding-degree", "2", "--hybrid-dp", "--sharding-stage", str(stage))
    found = sent(4, "ernie", *flags, "--dtype", "fp64")
    last, others = specs("ernie")
    assert found["replica/all_reduce"] == 2 * (padded(last + others, 2) // 2 * 8) // 2


@pytest.mark.parametrize(("stage", "gathers"), [(2, set()), (3, {"shard/all_gather"})])
def test_a_wait_has_the_kind_of_the_bytes_that_were_sent(stage: int, gathers: set[str]) -> None:
    flags = ("--sharding-degree", "2", "--hybrid-dp", "--sharding-stage", str(stage))
    record = run(4, "ernie", "--train-iters", "4", *flags).records[2]
    waits = {kind: waited for kind, waited in record.exposed_seconds.items() if kind.startswith(("shard/", "replica/"))}
    assert {"shard/reduce_scatter", "replica/all_reduce", *gathers} <= waits.keys() <= record.sent_bytes.keys()
    assert min(waits.values()) > 0
    assert sum(record.exposed_seconds.values()) == pytest.approx(record.exposed_communication_seconds)
    assert record.exposed_communication_seconds < record.iteration_seconds


@pytest.mark.parametrize(
    "flags",
    [
        ("--sharding-degree", "4", "--muon-qkv-split", "head"),
        ("--sharding-degree", "2", "--hybrid-dp", "--ep-degree", "2"),
        (
            "--mp-degree",
            "2",
            "--ep-degree",
            "2",
            "--sequence-parallel",
            "--sharding-stage",
            "3",
            "--muon-ns-dtype",
            "bf16",
        ),
    ],
)
def test_matrices_travel_to_be_orthogonalized_as_planned(flags: tuple[str, ...]) -> None:
    more = ("--optimizer", "muon", "--dtype", "fp64", *flags)
    line = last_wins((*SMALL["moe"], *COMMON), (*more, "--validate-only", "--world-size", "4"))
    planned = Plan(parse("moe", line, {}), device_kind("cpu")).traffic[0]["stage/all_to_all"]
    assert sent(4, "moe", *more)["stage/all_to_all"] == planned > 0


@pytest.mark.parametrize(
    "flags", [(), ("--sharding-degree", "2", "--hybrid-dp"), ("--sharding-degree", "1", "--hybrid-dp")]
)
@pytest.mark.parametrize("stage", ["1", "2"])
def test_experts_on_the_ranks_of_all_others_are_counted_with_them(flags: tuple[str, ...], stage: str) -> None:
    ranks = "4" if "2" in flags else "2"
    more = ("--sharding-stage", stage, "--dtype", "fp64", *flags)
    line = last_wins((*SMALL["moe"], *COMMON), (*more, "--validate-only", "--world-size", ranks))
    planned = Plan(parse("moe", line, {}), device_kind("cpu")).traffic[0]
    found = {name: size for name, size in sent(int(ranks), "moe", *more).items() if name in planned}
    assert found == pytest.approx(planned, rel=1e-4)
    assert not any(name.startswith("expert_") for name in planned)


def test_gradients_travel_in_the_dtype_that_was_asked_for() -> None:
    last, others = specs("ernie")
    elements = padded(last + others, 2)
    flags = ("--sharding-degree", "2", "--dtype", "bf16", "--grad-reduce-dtype", "bf16", "--sharding-stage")
    assert sent(2, "ernie", *flags, "1")["shard/reduce_scatter"] == elements * 2 // 2
    assert sent(2, "ernie", *flags, "2")["shard/reduce_scatter"] == 4 * elements * 2 // 2
    assert sent(2, "ernie", *flags, "3")["shard/reduce_scatter"] == 4 * elements * 2 // 2
    one = (*flags, "2", "--global-batch-size", "4", "--hybrid-dp")
    assert sent(4, "ernie", *one)["replica/all_reduce"] == 2 * (elements // 2 * 2) // 2


def test_experts_and_tensor_parallel_layers_are_counted_by_axis() -> None:
    found = sent(4, "moe", "--mp-degree", "2", "--ep-degree", "2", "--sequence-parallel", "--dtype", "fp64")
    assert {name.split("/")[0] for name in found} >= {"mp", "ep", "shard"}
    assert found["ep/all_to_all"] > 0
    assert found["mp/all_gather"] > 0
    assert found["mp/reduce_scatter"] > 0


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_coarser_reduction_rounds_gradients_and_nothing_else(stage: str) -> None:
    flags = ("--sharding-degree", "2", "--dtype", "fp32", "--sharding-stage", stage, "--attention-dropout", "0")
    if stage != "3":
        flags = (*flags, "--hybrid-dp")
    ranks = 2 if stage == "3" else 4
    fine = run(ranks, "ernie", *flags, "--hidden-dropout", "0").records
    coarse = run(ranks, "ernie", *flags, "--hidden-dropout", "0", "--grad-reduce-dtype", "bf16").records
    assert coarse[0].loss == fine[0].loss
    assert coarse[0].grad_norm != fine[0].grad_norm
    assert coarse[0].grad_norm == pytest.approx(fine[0].grad_norm, rel=2e-3)
    assert coarse[-1].loss == pytest.approx(fine[-1].loss, rel=2e-2)


@pytest.mark.parametrize("more", [(), ("--ampipe-cross-layer", "--recompute-interval", "1")])
def test_slices_gather_and_reduce_experts_once(more: tuple[str, ...]) -> None:
    """At stage 3, where experts form groups of their own; in bf16 a router does too, small, once per slice.

    A gather of the backward serves the recomputation too, whose own messages are not counted.
    """
    flags = ("--sharding-degree", "4", "--sharding-stage", "3", "--ep-degree", "2", "--dtype", "fp64")
    whole = sent(4, "moe", *flags)
    sliced = sent(4, "moe", *flags, "--ampipe-degree", "3", *more)
    kinds = [f"{axis}/{kind}" for axis in ("shard", "expert_shard") for kind in ("all_gather", "reduce_scatter")]
    assert [sliced[kind] for kind in kinds] == [whole[kind] for kind in kinds]
    assert min(sliced[kind] for kind in kinds) > 0


HIDDEN, TOPK, EXPERTS, RANKS, NODE = 32, 3, 8, 4, 2
FLAGS = ("--ep-degree", "4", "--num-experts", "8", "--moe-router-topk", "3")
FLAGS += ("--global-batch-size", "8", "--dtype", "fp32")


@dataclass
class StepTraffic:
    """What a rank sent in a step, by axis and kind, and the experts of its tokens, message by message."""

    sent: dict[str, int]
    routing: list[list[list[int]]]


class Recorded(StepObserver):
    """Keeps the experts of each token, message by message."""

    def __init__(self) -> None:
        self.messages: list[list[list[int]]] = []

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        self.messages.append(experts_Tk.tolist())
        return experts_Tk


def step(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> StepTraffic:
    seen = Recorded()
    line = last_wins((*SMALL["moe"], *COMMON), (*FLAGS, *flags))
    trainer = make_trainer("moe", line, rendezvous, observer=seen)
    sent = trainer.step().sent_bytes
    trainer.job.sharding.wait()
    trainer.loader.close()
    trainer.watch.close()
    trainer.world.close()
    return StepTraffic(sent, seen.messages)


def needed(ranks: Sequence[StepTraffic], count: Callable[..., tuple[Sent, ...]]) -> Sent:
    """Rows of all ranks in one pass of all messages of the step."""
    messages = [count(routing, EXPERTS, NODE) for routing in zip(*(rank.routing for rank in ranks), strict=True)]
    sent = [one for message in messages for one in message]
    return Sent(sum(one.between for one in sent), sum(one.within for one in sent))


def test_by_node_ranks_send_the_rows_that_the_routing_needs() -> None:
    ranks = run_ranks(RANKS, step, ("--moe-dispatch", "node", "--ranks-per-node", str(NODE)), group=False)
    four_passes = 2 * (node_row_bytes(HIDDEN, TOPK, 4, 4) + 4 * HIDDEN)
    rows = needed(ranks, rows_by_node)
    assert sum(rank.sent["ep_between/all_to_all"] for rank in ranks) == four_passes * rows.between
    assert sum(rank.sent["ep_within/all_to_all"] for rank in ranks) == four_passes * rows.within
    assert not any("ep/all_to_all" in rank.sent for rank in ranks)


def test_plain_ranks_send_a_row_for_each_pair() -> None:
    ranks = run_ranks(RANKS, step, ("--moe-dispatch", "plain"), group=False)
    four_passes = 2 * 4 * (row_columns(HIDDEN, 4, 4) + HIDDEN)
    rows = needed(ranks, plain_rows)
    counts = len(ranks[0].routing) * 8 * EXPERTS * (RANKS - 1)
    sent = sum(rank.sent["ep/all_to_all"] for rank in ranks)
    assert sent == four_passes * (rows.between + rows.within) + counts
