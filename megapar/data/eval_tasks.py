"""Evaluation tasks as sequences of ids, and their scores.

Contexts and choices meet as in lm-evaluation-harness (``_encode_pair``): trailing blanks of a context belong to the
choice, whose ids are those of the whole text after as many as the context has by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megapar.data.lazy_numpy import np
from megapar.data.sampling.samples import NO_LOSS, Sample
from megapar.data.tokenizers.tokenizer import MockTokenizer, NoTokenizer, Tokenizer
from megapar.errors import DataError
from megapar.files.task_file import TaskRecord, named_tasks, read_tasks

OF_TASK = "score/"  # prefix of a task's score among the results of an evaluation


@dataclass(frozen=True)
class EvalTask:
    """A task.

    Attributes:
        rows: For each choice of each record, in order, its ids after those of the context, and how many are its own.
    """

    name: str
    records: tuple[TaskRecord, ...]
    rows: tuple[tuple[np.ndarray, int], ...]

    @cached_property
    def order(self) -> list[int]:
        """The rows from the shortest to the longest, so that micro-batches have little padding."""
        return sorted(range(len(self.rows)), key=lambda row: len(self.rows[row][0]))

    def length(self, row: int) -> int:
        """Return the number of positions of a row."""
        return len(self.rows[row][0]) - 1

    def sample(self, row: int, length: int) -> Sample:
        """Return a row as a decoder's sample of ``length`` positions, which only predicts the choice."""
        ids, targets = self.rows[row]
        short, context = length + 1 - len(ids), len(ids) - 1 - targets
        labels = np.pad(ids[1:], (0, short), constant_values=NO_LOSS)
        labels[:context] = NO_LOSS
        sample = {"tokens": np.pad(ids[:-1], (0, short)), "labels": labels}
        return sample | ({"valid": np.arange(length) < len(ids) - 1} if short else {})

    def scores(self, log_likelihoods: Sequence[float], misses: Sequence[float]) -> dict[str, float]:
        """Return the mean scores of the records, without those of a kind that there is not.

        acc: the likeliest choice is right; acc_norm: so is the likeliest per character; greedy: every id of a
        completion is the likeliest one; perplexity: exp of minus the mean log-likelihood of a completion. The first of
        equal choices counts.

        Args:
            log_likelihoods: Of each row's choice.
            misses: Ids of each row's choice that are not the likeliest.
        """
        found: dict[str, list[float]] = {}
        first = 0
        for record in self.records:
            own = range(first, first := first + len(record.choices))
            sums = [log_likelihoods[row] for row in own]
            if record.gold is None:
                found.setdefault("greedy", []).append(not misses[own[0]])
                found.setdefault("log_likelihood", []).append(sums[0])
                continue
            per_character = [total / len(choice) for total, choice in zip(sums, record.choices, strict=True)]
            found.setdefault("acc", []).append(sums.index(max(sums)) == record.gold)
            found.setdefault("acc_norm", []).append(per_character.index(max(per_character)) == record.gold)
        means = {score: math.fsum(values) / len(values) for score, values in found.items()}
        if "log_likelihood" in means:
            mean = means.pop("log_likelihood")
            means["perplexity"] = math.exp(-mean) if mean > -700 else math.inf
        return means


def open_tasks(words: Sequence[str], tokenizer: Tokenizer, seq_length: int) -> tuple[EvalTask, ...]:
    """Read the files of ``--eval-tasks``. Raises DataError, with the line, for what cannot be scored.

    Rows of more than ``seq_length`` positions lose their beginning.
    """
    if words and isinstance(tokenizer, (NoTokenizer, MockTokenizer)):
        raise DataError("--eval-tasks needs the tokenizer of the model's text; pass --tokenizer-model")
    files = [(name, read_tasks(path)) for name, path in named_tasks(words)]
    return tuple(EvalTask(name, records, tuple(_rows(records, tokenizer, seq_length))) for name, records in files)


def _rows(records: Sequence[TaskRecord], tokenizer: Tokenizer, seq_length: int) -> Iterator[tuple[np.ndarray, int]]:
    contexts = [record.context.rstrip() for record in records]
    before = tokenizer.encode_batch(contexts)
    wholes = iter(tokenizer.encode_batch([record.context + text for record in records for text in record.choices]))
    begin = tokenizer.special.bos if tokenizer.special.bos is not None else tokenizer.special.eos
    for record, context, ids in zip(records, contexts, before, strict=True):
        if not context and begin is None:
            raise DataError(f"{record.place}: context is empty, and the tokenizer has no token that begins a text")
        for number, whole in zip(range(len(record.choices)), wholes, strict=False):
            own = whole[len(ids) :] if context else whole
            where = f"{record.place}: {'completion' if record.gold is None else f'choices[{number}]'}"
            if not 1 <= len(own) <= seq_length:
                raise DataError(f"{where} has {len(own)} ids after the context; 1 to {seq_length} (--seq-length) fit")
            row = [*(ids if context else [begin]), *own][-seq_length - 1 :]
            yield np.array(row, dtype=np.int64), len(own)
