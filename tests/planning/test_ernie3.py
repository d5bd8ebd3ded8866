"""Plans of ERNIE 3.0: the mixture of a micro-batch, what branches send and keep."""

from __future__ import annotations

import pytest

from megapar.arguments import parse
from megapar.model.ernie3.costs import mixes
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan

FLAGS = (
    *("--ernie-model", "ernie3", "--task-type-vocab-size", "5", "--num-layers", "6", "--hidden-size", "256"),
    *("--num-attention-heads", "4", "--seq-length", "128", "--generation-segments", "2", "--memory-length", "64"),
    *("--task-num-layers", "2", "--task-hidden-size", "64", "--task-num-attention-heads", "4", "--dtype", "bf16"),
    *("--ernie-tasks", "knowledge_mlm:1,document_lm:1,sentence_reorder:1", "--vocab-size", "1024"),
)


def plan(world_size: int, *flags: str) -> Plan:
    config = parse("ernie", [*FLAGS, *flags, "--validate-only", "--world-size", str(world_size)], {})
    return Plan(config, device_kind("h100-80g"))


@pytest.mark.parametrize(
    ("samples", "generation", "most", "idle"),
    [("3", 1.0, 1.0, (0.0, 0.0)), ("1", 1 / 3, 1.0, (1 / 3, 2 / 3)), ("2", 2 / 3, 1.0, (0.0, 1 / 3))],
)
def test_a_third_of_the_samples_generate(
    samples: str, generation: float, most: float, idle: tuple[float, float]
) -> None:
    """Of three numbers in a row one is the generating task's; a branch without samples runs one."""
    mean, worst = mixes(plan(1, "--micro-batch-size", samples).run.view.task_counts())
    assert mean.generation == pytest.approx(generation)
    assert mean.understanding == pytest.approx(int(samples) - generation)
    assert worst.generation == most
    assert (mean.idle_understanding, mean.idle_generation) == pytest.approx(idle)


def test_tasks_are_counted_until_they_repeat() -> None:
    counts = plan(
        1, "--micro-batch-size", "1", "--ernie-tasks", "knowledge_mlm:0.25,document_lm:0.2"
    ).run.view.task_counts()
    totals = {task: sum(batch[task] for batch in counts) for task in counts[0]}
    assert totals == {"knowledge_mlm": 5.0, "document_lm": 4.0}


def test_stages_send_as_many_features_as_the_next_one_takes() -> None:
    flags = ("--pp-degree", "4", "--gradient-merge-acc-step", "8", "--micro-batch-size", "1")
    found = plan(4, *flags, "--pp-seg-method", "0,3,6,7")
    layers = [[list(chunk.layers) for chunk in found.run.stages.on(stage)] for stage in range(4)]
    assert layers[1:] == [[[3, 4, 5]], [[6]], [[7]]]
    wide, narrow = 8 * 128 * 256 * 2, 8 * 128 * 64 * 2
    # The first branch layer takes what the universal ones make; gradients go back alike.
    assert found.traffic[1]["pp/send"] == 2 * wide
    assert found.traffic[2]["pp/send"] == wide + narrow


def test_more_generation_takes_more_memory_and_time_than_less() -> None:
    one, two = (
        plan(1, "--micro-batch-size", "300", "--ernie-tasks", f"knowledge_mlm:1,document_lm:{share}")
        for share in (1, 5)
    )
    assert two.fullest.activations > one.fullest.activations
    assert two.speed.step_seconds > one.speed.step_seconds
    assert one.counts == two.counts
