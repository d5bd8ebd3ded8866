"""Samples of several tasks in one sequence; each sample belongs to one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from megapar.data.batches import MicroBatch, micro_batch
from megapar.data.sampling.draws import Draws
from megapar.data.sampling.mixture import Shares
from megapar.data.sampling.samples import NO_LOSS, PieceOrder, Sample
from megapar.data.tasks.task import Task
from megapar.model.ernie3.tasks import CLASSES, GENERATION, TASKS, accuracy_of


class TaskSamples:
    """Samples of several tasks; sample ``number`` depends only on (seed, number).

    Every task has its share of the first n samples, evenly spread (``mixture.Shares``), and reads its own pieces in its
    own order. Each sample has an additional array ``task``, the index of its task in TASKS.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Mapping[str, Fraction],
        orders: Sequence[PieceOrder],
        seed: int | None,
        length: int,
    ) -> None:
        """Mix the tasks by their weights.

        Args:
            weights: Weight of each task, by name.
            orders: Order of each task's pieces.
            seed: Seed of the samples; None for the fixed held-out ones.
            length: Number of samples of one epoch.
        """
        self._tasks, self._orders, self._seed, self._length = tuple(tasks), tuple(orders), seed, length
        self._shares = Shares([weights[task.name] for task in tasks])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Sample:
        import numpy as np

        which, own = self._shares.find(number)
        task = self._tasks[which]
        draws = Draws(0, f"heldout/{task.name}", own) if self._seed is None else Draws(self._seed, task.name, own)
        sample = task.make(self._orders[which][own], draws)
        return {**sample, "task": np.array(TASKS.index(task.name), dtype=np.int64)}


def collate_tasks(samples: Sequence[Sample], names: Sequence[str]) -> MicroBatch:
    """Collate samples into one micro-batch. ``names`` are the tasks of the run, with or without a sample here.

    In addition to the tensors of every ERNIE micro-batch, it contains:
        understanding, generation: [rows], the samples that run through each branch.
        NAME_index: [items] of each task, positions flat into B * S, or samples for a task that predicts a class.
        NAME_labels: [items] of each task.
    """
    import numpy as np

    stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    rows, length = stacked["tokens"].shape
    kinds, labels = stacked["task"], stacked["labels"]
    generation = np.isin(kinds, [TASKS.index(name) for name in GENERATION])
    arrays = {
        "tokens": stacked["tokens"],
        "token_types": stacked["token_types"],
        "task_types": np.broadcast_to(kinds[:, None], (rows, length)),
        "understanding": np.flatnonzero(~generation),
        "generation": np.flatnonzero(generation),
    }
    counts: dict[str, float] = {}
    for name in names:
        of_task = kinds == TASKS.index(name)
        predicted = stacked["label"] != NO_LOSS if name in CLASSES else labels != NO_LOSS
        index = np.flatnonzero(predicted & (of_task if name in CLASSES else of_task[:, None]))
        arrays[f"{name}_index"] = index
        arrays[f"{name}_labels"] = (stacked["label"] if name in CLASSES else labels.reshape(-1))[index]
        counts[name] = len(index)
        if name in CLASSES:
            counts[accuracy_of(name)] = len(index)
    return micro_batch(arrays, stacked["valid"], counts)
