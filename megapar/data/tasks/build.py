"""The training and held-out samples of a mixture of tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megapar.data.sampling.data_phases import PhasedPieces
from megapar.data.sampling.frame import Frame
from megapar.data.sampling.mixture import Shares
from megapar.data.sampling.samples import DocumentPieces, PieceOrder, Samples, order_of
from megapar.data.tasks.document_lm import DocumentLm
from megapar.data.tasks.knowledge_mlm import KnowledgeMlm
from megapar.data.tasks.knowledge_text import KnowledgeText, RandomTriples, Triples, read_triples
from megapar.data.tasks.lexicon import Lexicon
from megapar.data.tasks.samples import TaskSamples
from megapar.data.tasks.sentence_distance import SentenceDistance
from megapar.data.tasks.sentence_reorder import SentenceReorder
from megapar.data.tasks.task import Task
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.errors import DataError
from megapar.model.ernie3.tasks import DISTANCE, DOCUMENT_LM, KNOWLEDGE_MLM, KNOWLEDGE_TEXT, REORDER, tasks_of


@dataclass(frozen=True)
class TaskData:
    """The values of ``--ernie-tasks`` and of the flags that name its files.

    Attributes:
        mixture: Tasks and weights, in the form that ``model.ernie3.tasks.tasks_of`` reads.
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
        return tuple(tasks_of(self.mixture))

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
        if KNOWLEDGE_TEXT not in self.names:
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
        return TaskSamples(tasks, tasks_of(self.data.mixture), orders, self.seed, len(self.pieces))

    def _order(self, task: Task) -> PieceOrder:
        pieces = self.triples if isinstance(task, KnowledgeText) else self.pieces
        assert pieces is not None
        if isinstance(pieces, PhasedPieces) and self.seed is not None:
            return pieces.order(self.seed, f"tasks/{task.name}", self._count_of(task))
        return order_of(pieces, self.seed, f"tasks/{task.name}")

    def _count_of(self, task: Task) -> Callable[[int], int]:
        """Return a function of n that counts the samples of a task among the run's first n samples."""
        weights = tasks_of(self.data.mixture)
        shares, number = Shares([weights[name] for name in self.data.names]), self.data.names.index(task.name)
        return lambda samples: shares.count(number, samples)

    def _task(self, name: str) -> Task:
        pieces, frame, probability = self.pieces, self.frame, self.data.mlm_probability
        if name == KNOWLEDGE_MLM:
            return KnowledgeMlm(pieces, frame, self.lexicon, probability)
        if name == DOCUMENT_LM:
            return DocumentLm(pieces, frame)
        if name == REORDER:
            return SentenceReorder(pieces, frame, self.data.reorder_pieces)
        if name == DISTANCE:
            return SentenceDistance(pieces, frame)
        if self.triples is None:
            raise DataError(f"{KNOWLEDGE_TEXT} needs triples")
        return KnowledgeText(self.triples, frame, probability)
