"""Every task's samples against what is written here by hand, and their purity."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.ernie import Frame
from megapar.data.sampling.samples import NO_LOSS, RandomPieces
from megapar.data.tasks.build import TaskData, TaskSamples, collate_tasks
from megapar.data.tasks.knowledge import KnowledgeMlm, KnowledgeText, Lexicon, Triple, read_triples
from megapar.data.tasks.sentences import (
    ADJACENT,
    OTHER,
    SAME,
    DocumentLm,
    SentenceDistance,
    SentenceReorder,
    class_of,
    cut_evenly,
    permutation,
)
from megapar.data.tokenizers.tokenizer import MockTokenizer, WordMarks
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.errors import DataError
from megapar.model.ernie3.sizes import TASKS, reorder_classes, tasks_of

TOKENIZER = MockTokenizer(101)
CLS, SEP, PAD, MASK = 4, 5, 0, 6


class Given:
    """Pieces as they are given, with the documents they are from."""

    def __init__(self, pieces: list[list[int]], documents: list[int]) -> None:
        self._pieces, self._documents = pieces, documents

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.array(self._pieces[number], dtype=np.int64)

    def document(self, number: int) -> int:
        return self._documents[number]


PIECES = Given([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]], [0, 0, 1])


def frame(length: int = 10) -> Frame:
    return Frame.of(TOKENIZER, length)


def test_document_lm_asks_for_every_next_token() -> None:
    sample = DocumentLm(PIECES, frame()).make(0, Draws(1, "x", 0))
    assert sample["tokens"].tolist() == [CLS, 10, 11, 12, 13, 14, 15, SEP, PAD, PAD]
    assert sample["labels"].tolist() == [10, 11, 12, 13, 14, 15, SEP, NO_LOSS, NO_LOSS, NO_LOSS]
    assert sample["valid"].tolist() == [True] * 8 + [False] * 2
    assert sample["label"] == NO_LOSS


def test_permutations_and_their_classes_by_hand() -> None:
    assert [permutation(rank, 3) for rank in range(6)] == sorted(itertools.permutations(range(3)))
    assert class_of((0,)) == 0
    assert [class_of(order) for order in ((0, 1), (1, 0))] == [1, 2]
    assert [class_of(order) for order in sorted(itertools.permutations(range(3)))] == [3, 4, 5, 6, 7, 8]
    assert [reorder_classes(most) for most in (1, 2, 3, 4)] == [1, 3, 9, 33]


def test_sentence_reordering_permutes_whole_parts() -> None:
    task, seen = SentenceReorder(PIECES, frame(), 3), {}
    for number in range(200):
        sample = task.make(0, Draws(7, "x", number))
        shown = tuple(sample["tokens"][1:7].tolist())
        assert seen.setdefault(int(sample["label"]), shown) == shown
        assert sample["tokens"][0] == CLS
        assert sample["tokens"][7] == SEP
        assert (sample["labels"] == NO_LOSS).all()
    assert seen == {
        0: (10, 11, 12, 13, 14, 15),
        1: (10, 11, 12, 13, 14, 15),
        2: (13, 14, 15, 10, 11, 12),
        3: (10, 11, 12, 13, 14, 15),
        4: (10, 11, 14, 15, 12, 13),
        5: (12, 13, 10, 11, 14, 15),
        6: (12, 13, 14, 15, 10, 11),
        7: (14, 15, 10, 11, 12, 13),
        8: (14, 15, 12, 13, 10, 11),
    }


def test_sentence_distance_classes_by_hand() -> None:
    task = SentenceDistance(PIECES, frame())
    found: dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {ADJACENT: set(), SAME: set(), OTHER: set()}
    for number in range(200):
        sample = task.make(0, Draws(7, "x", number))
        tokens = sample["tokens"].tolist()
        assert tokens[:1] + tokens[3:4] + tokens[6:] == [CLS, SEP, SEP, PAD, PAD, PAD]
        assert sample["token_types"].tolist() == [0] * 4 + [1] * 3 + [0] * 3
        found[int(sample["label"])].add((tuple(tokens[1:3]), tuple(tokens[4:6])))
    assert found[ADJACENT] == {((10, 11), (12, 13)), ((12, 13), (14, 15))}
    assert found[SAME] == {((10, 11), (14, 15))}
    assert found[OTHER] == {((10, 11), (32, 33)), ((10, 11), (34, 35))}


def test_uneven_thirds_of_two_documents_fit_one_sample() -> None:
    marks = WordMarks(np.isin(np.arange(101), (10, 20)), np.zeros(101, dtype=bool))
    uneven = Given([[11] * 15 + [10, 11], [20] + [21] * 15 + [20]], [0, 1])
    task = SentenceDistance(uneven, replace(frame(20), marks=marks))
    for number in range(50):
        sample = task.make(0, Draws(1, "x", number))
        assert int((sample["tokens"] == SEP).sum()) == 2
        assert sample["tokens"].shape == (20,)


def test_sentence_distance_needs_two_documents() -> None:
    with pytest.raises(DataError, match="one document"):
        SentenceDistance(Given([[10] * 6, [11] * 6], [0, 0]), frame())


def test_lexicons_match_longest_first_at_word_borders() -> None:
    lexicon = Lexicon([(10, 11), (11, 12, 13), (14, 15), (20,)])
    ids, words = np.array([10, 11, 12, 13, 14, 15]), np.ones(6, dtype=bool)
    assert lexicon.spans(ids, words) == [(1, 4), (4, 6)]
    assert lexicon.unit_starts(ids, words).tolist() == [True, True, False, False, True, False]
    inside = words.copy()
    inside[1] = False  # 10 11 is one word: no entry begins in its middle
    assert lexicon.spans(ids, inside) == [(0, 2), (4, 6)]
    assert Lexicon([]).spans(ids, words) == []
    assert len(lexicon) == 3


def test_knowledge_masks_units_whole() -> None:
    task = KnowledgeMlm(PIECES, frame(), Lexicon([(11, 12, 13)]), 0.4)
    fates = set()
    for number in range(300):
        sample = task.make(0, Draws(3, "x", number))
        asked = sample["labels"][1:7] != NO_LOSS
        assert sample["labels"][1:7][asked].tolist() == np.array(PIECES[0])[asked].tolist()
        assert asked[1] == asked[2] == asked[3]
        if asked[1]:
            fates.add(tuple((sample["tokens"][2:5] == MASK).tolist()))
    assert fates == {(True, True, True), (False, False, False)}


def test_rate_and_split_of_masking_over_ten_thousand_samples() -> None:
    pieces = RandomPieces(TOKENIZER.ordinary_ids, 40, 60, 1, "x")
    lexicon = Lexicon([(a, b) for a in range(7, 40) for b in range(7, 40)])
    task = KnowledgeMlm(pieces, frame(64), lexicon, 0.15)
    tokens = asked = masked = kept = 0
    for number in range(10_000):
        sample = task.make(number, Draws(5, "x", number))
        ids, labels = sample["tokens"], sample["labels"]
        chosen = labels != NO_LOSS
        tokens += int(sample["valid"].sum()) - 2
        asked += int(chosen.sum())
        masked += int((ids[chosen] == MASK).sum())
        kept += int((ids[chosen] == labels[chosen]).sum())
    assert asked / tokens == pytest.approx(0.15, abs=0.01)
    assert masked / asked == pytest.approx(0.8, abs=0.01)
    assert kept / asked == pytest.approx(0.1 + 0.1 / 94, abs=0.01)  # a random id may be the right one


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_knowledge_text_masks_the_relation_or_words() -> None:
    task = KnowledgeText([Triple(ids(10), ids(11, 12), ids(13), ids(20, 21, 22))], frame(12), 0.5)
    relations = words = 0
    for number in range(100):
        sample = task.make(0, Draws(2, "x", number))
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        assert tokens[5] == tokens[9] == SEP
        if labels[2] != NO_LOSS:
            assert tokens == [CLS, 10, MASK, MASK, 13, SEP, 20, 21, 22, SEP, PAD, PAD]
            assert labels == [NO_LOSS] * 2 + [11, 12] + [NO_LOSS] * 8
            relations += 1
        else:
            assert tokens[1:5] == [10, 11, 12, 13]
            assert {label for label in labels[6:9] if label != NO_LOSS} <= {20, 21, 22}
            assert any(label != NO_LOSS for label in labels[6:9])
            words += 1
    assert min(relations, words) > 30


def test_triples_are_read_and_held_out(tmp_path: Path) -> None:
    path = tmp_path / "triples.tsv"
    lines = [f"t{10 + n}\tt11 t12\tt13\tt20 t21 t{30 + n}" for n in range(40)]
    path.write_text("\n".join(lines))
    triples = read_triples(path, TOKENIZER, Split.parse("80,20"))
    train, heldout = triples.train, triples.heldout
    assert len(train) + len(heldout) == 40
    assert len(train) > len(heldout) > 0
    assert train[0].relation.tolist() == [11, 12]
    path.write_text("t10\tt11\tt12\n")
    with pytest.raises(DataError, match="line 1: 3 cells"):
        read_triples(path, TOKENIZER, Split.parse("80,20"))


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    path = tmp_path / "triples.tsv"
    path.write_text("t10\tt11\tt12\tt20 \u2028t21\nt10\tt11\tt12\tt20 t22\n", encoding="utf-8")
    assert len(read_triples(path, TOKENIZER, Split.parse("100,0")).train) == 2


def test_pieces_are_cut_evenly_at_words() -> None:
    words = np.array([True, False, True, True, False, False, True, False])
    assert [(s.start, s.stop) for s in cut_evenly(words, 3)] == [(0, 2), (2, 6), (6, 8)]
    assert [(s.start, s.stop) for s in cut_evenly(np.array([True, False, False]), 3)] == [(0, 1), (1, 2), (2, 3)]


MIXTURE = "knowledge_mlm:1.0,document_lm:1.0,sentence_reorder:0.5,sentence_distance:0.5,knowledge_text:0.5"


def mixed(seed: int = 7) -> tuple[TaskSamples, TaskSamples]:
    data = TaskData(MIXTURE)
    sides = [RandomPieces(TOKENIZER.ordinary_ids, 20, 29, s, name) for s, name in ((seed, "train"), (0, "heldout"))]
    samples = data.samples(TrainHeldout(*sides), TOKENIZER, 32, seed, Split.parse("95,5"))
    return samples.train, samples.heldout  # type: ignore[return-value]


def test_a_sample_depends_on_the_seed_and_its_number_only() -> None:
    one, again, other = mixed()[0], mixed()[0], mixed(8)[0]
    for number in (0, 5, 10**6, 3):
        a, b = one[number], again[number]
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert any(not np.array_equal(one[n]["tokens"], other[n]["tokens"]) for n in range(3))
    held, too = mixed()[1], mixed(8)[1]
    assert all(np.array_equal(held[n]["tokens"], too[n]["tokens"]) for n in range(20))
    assert all(max(order[n] for n in range(9)) > len(held) // 2 for order in held._orders)


def test_every_task_has_its_share() -> None:
    samples = mixed()[0]
    counts = np.bincount([int(samples[n]["task"]) for n in range(700)], minlength=5)
    assert counts.tolist() == [200, 200, 100, 100, 100]


def test_a_micro_batch_counts_each_tasks_own_items() -> None:
    samples = mixed()[0]
    drawn = [samples[n] for n in range(14)]
    batch = collate_tasks(drawn, TASKS)
    kinds = [TASKS[int(sample["task"])] for sample in drawn]
    assert batch.counts["sentence_reorder"] == batch.counts["sentence_reorder_accuracy"] == 2
    assert batch.tensors["generation"].tolist() == [n for n, kind in enumerate(kinds) if kind == "document_lm"]
    both = torch.cat((batch.tensors["generation"], batch.tensors["understanding"]))
    assert sorted(both.tolist()) == list(range(14))
    for name in ("knowledge_mlm", "document_lm", "knowledge_text"):
        mine = [sample for sample, kind in zip(drawn, kinds, strict=True) if kind == name]
        assert batch.counts[name] == sum(int((sample["labels"] != NO_LOSS).sum()) for sample in mine)
        rows = batch.tensors[f"{name}_index"] // 32
        assert {kinds[row] for row in rows.tolist()} == {name}
    alone = collate_tasks([drawn[kinds.index("sentence_distance")]], TASKS)
    assert alone.counts["document_lm"] == 0
    assert alone.tensors["document_lm_index"].shape == (0,)


def test_mixtures_are_read() -> None:
    assert tasks_of("document_lm:0.5,knowledge_mlm") == {"knowledge_mlm": Fraction(1), "document_lm": Fraction(1, 2)}
    assert "knowledge_text" not in tasks_of(None)
    for wrong in ("poetry:1", "document_lm:x", "document_lm:0", "document_lm:1,document_lm:1", "document_lm:-1"):
        with pytest.raises(ValueError, match=r"poetry|NAME|above|twice|below"):
            tasks_of(wrong)


def test_orders_are_taken_as_given() -> None:
    task = DocumentLm(PIECES, frame())
    samples = TaskSamples([task], {"document_lm": Fraction(1)}, [(2, 0, 1, 2)], None, 3)
    assert [int(samples[n]["tokens"][1]) for n in range(4)] == [30, 10, 20, 30]
