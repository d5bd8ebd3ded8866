"""The observer of a trainer sees every part of a step, in order, and can decide the routing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest
import torch
from torch import Tensor, nn

from megapar.core.sharding.sharding import Sharding
from megapar.training.step.observer import StepObserver
from megapar.training.step.result import StepResult
from tests.support.training import make_trainer

SMALL = "--data-path mock --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2"
SMALL += " --seq-length 16 --vocab-size 128 --micro-batch-size 1 --gradient-merge-acc-step 2 --train-iters 1"
SMALL += " --num-experts 4 --moe-router-topk 1 --moe-ffn-hidden-size 16 --first-k-dense 1 --dtype fp32"


class Notes(StepObserver):
    """Writes down what it is called with. choice: the expert of all tokens; None: the router decides."""

    def __init__(self, choice: int | None = None) -> None:
        self.events: list[str] = []
        self.loads: Counter[int] = Counter()
        self._choice = choice

    def model_built(self, model: nn.Module) -> None:
        self.events.append(f"built {type(model).__name__}")

    def forward_begins(self, micro_batch: int) -> None:
        self.events.append(f"micro-batch {micro_batch}")

    @contextmanager
    def _again(self, number: int) -> Iterator[None]:
        self.events.append(f"unit {number} again")
        yield
        self.events.append(f"unit {number} done")

    def recomputation(self) -> AbstractContextManager[object]:
        self.events.append("unit")
        return self._again(self.events.count("unit"))

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        self.events.append(f"router {layer}")
        if self._choice is not None:
            experts_Tk = torch.full_like(experts_Tk, self._choice)
        self.loads.update(experts_Tk.flatten().tolist())
        return experts_Tk

    def gradients_reduced(self, sharding: Sharding) -> None:
        self.events.append(f"gradients {all(shard.grad is not None for shard in sharding.master_shards)}")

    def host_waited(self, where: str) -> None:
        self.events.append(where)


def step(flags: str, observer: StepObserver) -> StepResult:
    """One step of a trainer."""
    trainer = make_trainer("moe", f"{SMALL} {flags}".split(), observer=observer)
    with closing(trainer.loader):
        return trainer.step()


def test_a_step_is_seen_in_order() -> None:
    notes = Notes()
    step("", notes)
    once = ["micro-batch {}", "router 1"]
    forwards = [event.format(number) for number in (0, 1) for event in once]
    assert notes.events == ["built Decoder", *forwards, "gradients True", "Stepper._apply_votes"]


def test_a_recomputed_unit_runs_again_inside_its_context() -> None:
    notes = Notes()
    step("--recompute-interval 2", notes)
    first = ["micro-batch 0", "unit", "router 1", "unit 1 again", "router 1"]
    assert notes.events[1 : 1 + len(first)] == first
    assert notes.events.count("unit") == 2


@pytest.mark.parametrize("expert", [0, 3])
def test_the_observer_s_choice_is_the_routing(expert: int) -> None:
    notes = Notes(expert)
    load = step("", notes).totals.load.flatten().tolist()
    assert notes.loads == {expert: 2 * 16}
    assert load == [2 * 16 * (number == expert) for number in range(4)]
