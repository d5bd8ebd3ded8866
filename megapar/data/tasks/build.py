"""The samples of a mixture of tasks, training and held-out ones; each sample belongs to one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megapar.data.batches import MicroBatch, micro_batch
from megapar.data.lazy_numpy import np
from megapar.data.sampling.data_phases import PhasedPieces
from megapar.data.sampling.draws import Draws
from megapar.data.sampling.ernie import Frame
from megapar.data.sampling.mixture import Shares
from megapar.data.sampling.samples import NO_LOSS, DocumentPieces, PieceOrder, Sample, Samples, order_of
from megapar.data.tasks.knowledge import KnowledgeMlm, KnowledgeText, Lexicon, RandomTriples, Triples, read_triples
from megapar.data.tasks.sentences import DocumentLm, SentenceDistance, SentenceReorder, Task
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.errors import DataError
from megapar.model.ernie3 import sizes


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
        """Mix the tasks by their weights. ``seed`` is None for held-out samples, ``length`` that of one epoch."""
        self._tasks, self._orders, self._seed, self._length = tuple(tasks), tuple(orders), seed, length
        self._shares = Shares([weights[task.name] for task in tasks])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Sample:
        part, count = self._shares.find(number)
        task = self._tasks[part]
        draws = Draws(0, f"heldout/{task.name}", count) if self._seed is None else Draws(self._seed, task.name, count)
        sample = task.make(self._orders[part][count], draws)
        return {**sample, "task": np.array(sizes.TASKS.index(task.name), dtype=np.int64)}


def collate_tasks(samples: Sequence[Sample], names: Sequence[str]) -> MicroBatch:
    """Collate samples into one micro-batch. ``names`` are the tasks of the run, with or without a sample here.

    In addition to the tensors of every ERNIE micro-batch, it contains:
        understanding, generation: [rows], the samples that run through each branch.
        NAME_index: [items] of each task, positions flat into B * S, or samples for a task that predicts a class.
        NAME_labels: [items] of each task.
    """
    stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    rows, length = stacked["tokens"].shape
    kinds, labels = stacked["task"], stacked["labels"]
    generation = np.isin(kinds, [sizes.TASKS.index(name) for name in sizes.GENERATION])
    arrays = {
        "tokens": stacked["tokens"],
        "token_types": stacked["token_types"],
        "task_types": np.broadcast_to(kinds[:, None], (rows, length)),
        "understanding": np.flatnonzero(~generation),
        "generation": np.flatnonzero(generation),
    }
    counts: dict[str, float] = {}
    for name in names:
        of_task = kinds == sizes.TASKS.index(name)
        predicted = stacked["label"] != NO_LOSS if name in sizes.CLASSES else labels != NO_LOSS
        index = np.flatnonzero(predicted & (of_task if name in sizes.CLASSES else of_task[:, None]))
        arrays[f"{name}_index"] = index
        arrays[f"{name}_labels"] = (stacked["label"] if name in sizes.CLASSES else labels.reshape(-1))[index]
        counts[name] = len(index)
        if name in sizes.CLASSES:
            counts[sizes.accuracy_of(name)] = len(index)
    return micro_batch(arrays, stacked["valid"], counts)


@dataclass(frozen=True)
class TaskData:
    """The values of ``--ernie-tasks`` and of the flags that name its files.

    Attributes:
        mixture: Tasks and weights, in the form that ``model.ernie3.sizes.tasks_of`` reads.
        phrase_file: Phrases that are masked whole, one per line.
        entity_file: Named entities that are masked whole, one per line.
        triples_file: Triples and sentences of the task knowledge_text; None uses random ones.
        reorder_pieces: Maximum number of parts that sentence_reorder permutes.
        mlm_probability: Share of the masked units.
    """

    mixture: str | None = None
    phrase_file: str | None = None
    entity_file: str | None = None
    triples_file: str | None = None
    reorder_pieces: int = 3
    mlm_probability: float = 0.15

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, in the order of TASKS."""
        return tuple(sizes.tasks_of(self.mixture))

    def samples(
        self, pieces: TrainHeldout[DocumentPieces], tokenizer: Tokenizer, seq_length: int, seed: int, split: Split
    ) -> TrainHeldout[Samples]:
        """Return the samples of the tasks. Raises DataError if a file of theirs cannot be read or has too few lines."""
        lexicon = Lexicon.read([path for path in (self.phrase_file, self.entity_file) if path], tokenizer)
        frame, triples = Frame.of(tokenizer, seq_length), self._triples(tokenizer, seq_length, seed, split)
        train = _Side(self, pieces.train, frame, lexicon, triples.train if triples else None, seed)
        if pieces.heldout is None:
            return TrainHeldout(train.samples(), None)
        if triples and not (triples.heldout and len(triples.heldout)):
            raise DataError(f"{self.triples_file}: no triple is held out; pass more triples, or another --split")
        heldout = replace(train, pieces=pieces.heldout, triples=triples.heldout if triples else None, seed=None)
        return TrainHeldout(train.samples(), heldout.samples())

    def _triples(self, tokenizer: Tokenizer, seq_length: int, seed: int, split: Split) -> TrainHeldout[Triples] | None:
        if sizes.KNOWLEDGE_TEXT not in self.names:
            return None
        if self.triples_file:
            return read_triples(self.triples_file, tokenizer, split)
        ids, longest = tokenizer.ordinary_ids, max(1, seq_length // 2)
        return TrainHeldout(RandomTriples(ids, seed, "train", longest), RandomTriples(ids, 0, "heldout", longest))


@dataclass(frozen=True)
class _Side:
    """The training or the held-out documents, as the tasks read them. ``seed`` is None for held-out ones."""

    data: TaskData
    pieces: DocumentPieces
    frame: Frame
    lexicon: Lexicon
    triples: Triples | None
    seed: int | None

    def samples(self) -> TaskSamples:
        tasks = [self._task(name) for name in self.data.names]
        orders = [self._order(task) for task in tasks]
        return TaskSamples(tasks, sizes.tasks_of(self.data.mixture), orders, self.seed, len(self.pieces))

    def _order(self, task: Task) -> PieceOrder:
        pieces = self.triples if isinstance(task, KnowledgeText) else self.pieces
        assert pieces is not None
        if isinstance(pieces, PhasedPieces) and self.seed is not None:
            return pieces.order(self.seed, f"tasks/{task.name}", self._count_of(task))
        return order_of(pieces, self.seed, f"tasks/{task.name}")

    def _count_of(self, task: Task) -> Callable[[int], int]:
        """Return a function of n that counts the samples of a task among the run's first n samples."""
        weights = sizes.tasks_of(self.data.mixture)
        shares, number = Shares([weights[name] for name in self.data.names]), self.data.names.index(task.name)
        return lambda samples: shares.count(number, samples)

    def _task(self, name: str) -> Task:
        pieces, frame, probability = self.pieces, self.frame, self.data.mlm_probability
        if name == sizes.KNOWLEDGE_MLM:
            return KnowledgeMlm(pieces, frame, self.lexicon, probability)
        if name == sizes.DOCUMENT_LM:
            return DocumentLm(pieces, frame)
        if name == sizes.REORDER:
            return SentenceReorder(pieces, frame, self.data.reorder_pieces)
        if name == sizes.DISTANCE:
            return SentenceDistance(pieces, frame)
        if self.triples is None:
            raise DataError(f"{sizes.KNOWLEDGE_TEXT} needs triples")
        return KnowledgeText(self.triples, frame, probability)
