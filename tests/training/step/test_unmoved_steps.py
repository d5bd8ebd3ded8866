"""What a GPU is asked for with ``--moe-rebalance-interval``, in steps that move experts and in those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from megapar.arguments import parse
from megapar.core.optimizer.exact_sum import UNITS
from megapar.tools.tracing.pretend import pretend
from scripts.tracing.gpu import FakeGpu, as_on_a_gpu
from scripts.tracing.tally import Sums, Tally, WaitTally
from tests.support import away
from tests.support.ranks import run_ranks

LAYERS = 2
MEASURED = 3  # the step
MODEL = f"--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --bf16"
MODEL += " --data-path mock --device cpu --micro-batch-size 2 --first-k-dense 0 --num-experts 8 --moe-router-topk 2"
MODEL += " --moe-ffn-hidden-size 64 --ep-degree 2"
NORM = 11  # kernels that add squares regardless of places
NORM_BYTES = 8 * len(UNITS)  # in the all-reduce of the norm


class Step(NamedTuple):
    sums: Sums
    sent: dict[str, int]


def step(rank: int, world_size: int, rendezvous: str, flags: Sequence[str], moves_in: int) -> Step:
    """The third step of the last rank. moves_in: the step that moves all experts; 0: none."""
    config = parse("moe", [*MODEL.split(), *flags], {"WORLD_SIZE": "2", "RANK": "0"})
    device = FakeGpu(torch.device("meta"))
    tally = Tally("meta", device.locked)
    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu(device))
        trainer = stack.enter_context(pretend(config, 1, tally, device, WaitTally(tally), padded=False))
        for number in range(1, MEASURED + 1):
            if number == moves_in:
                away.begin(trainer)
            tally.sums = Sums()
            sent = trainer.step().sent_bytes
        assert trainer.places.away is (moves_in > 0)
        return Step(tally.sums, sent)


def of(*flags: str, moves_in: int = 0) -> Step:
    return run_ranks(1, step, flags, moves_in, group=False, timeout=120)[0]


def test_a_step_that_moves_nothing_waits_copies_and_sends_as_without_the_flag() -> None:
    """More is the norm's alone, for the whole model; where experts are away, a layer looks up slots and counts."""
    off, on = of(), of("--moe-rebalance-interval", "100")
    away = of("--moe-rebalance-interval", "100", moves_in=1)
    for found in (on, away):
        assert found.sums.waits == off.sums.waits
        assert found.sums.copies == off.sums.copies
        assert found.sums.products == off.sums.products
        assert found.sent == {**off.sent, "world/all_reduce": off.sent["world/all_reduce"] + NORM_BYTES}
    more = on.sums.without(off.sums)
    assert {label for _, label in more.kernels} == {"global_norm", "parts", "total"}
    assert on.sums.launches - off.sums.launches <= NORM
    assert away.sums.without(on.sums).kernels == {
        ("index", "ExpertSlots.of"): LAYERS,
        ("index_select", "ExpertSlots.of"): LAYERS,
    }


def test_a_step_that_moves_experts_waits_no_more_than_others() -> None:
    """The numbers of rows and slots are copied from pinned memory, once for each message and each layer."""
    still = of("--moe-rebalance-interval", "100")
    moving = of("--moe-rebalance-interval", "100", moves_in=MEASURED)
    more = moving.sums.without(still.sums)
    messages = more.kernels["alltoall_base_", "all_to_all"]
    assert moving.sums.waits == still.sums.waits
    assert messages == 2 * LAYERS  # of the up and the down projection
    assert more.copies == {("to device", "Device.integers"): messages + LAYERS}
