"""A corpus, ready to train on: samples of both sides, the tokenizer, and what a model that knows nothing would lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megapar.config.record import FIELD, LONGEST_LINE
from megapar.config.vocabulary import too_large
from megapar.data.batches import Collate, collate_decoder, collate_ernie
from megapar.data.blend import Part, Side, open_parts, open_sides
from megapar.data.cache import digest, made_once
from megapar.data.contents import Content, contents_of
from megapar.data.course import Course, Coursed
from megapar.data.ernie import SHORTEST_SEQUENCE, ErnieSamples, Spans
from megapar.data.frame import PAIR_MARKS
from megapar.data.mixture import Blend
from megapar.data.mock import MockTokenizer, RandomPieces
from megapar.data.samples import Boundaries, DecoderSamples, DocumentWindows, Pieces, Samples, Windows
from megapar.data.source import MOCK, BadRecords, Source, all_documents, sources_hash
from megapar.data.store import Split, TokenStore
from megapar.data.streaming import RowSpans, RowWindows, both_sides, open_dataset
from megapar.data.tasks.build import TaskData
from megapar.data.tasks.samples import collate_tasks
from megapar.data.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from megapar.errors import ConfigError, DataError

ERNIE = "ernie"
KINDS = ("moe", ERNIE)
DEFAULT_SPLIT = "95,5"


class Unigram(NamedTuple):
    """Nats per token of the training tokens' own frequencies: what a model loses that knows only those.

    train: their entropy. heldout: the cross-entropy of the held-out tokens under them (counts plus one), not a number
    where nothing is held out.
    """

    train: float
    heldout: float


class Both(NamedTuple):
    """The ids of both sides: stores, or several of them together."""

    train: TokenStore | Side
    heldout: TokenStore | Side | None


@dataclass(frozen=True)
class Packing:
    """How documents become samples of a decoder.

    packed: documents are joined to full samples; off: a sample holds (a piece of) one document and is padded.
    The others: see samples.Boundaries.
    """

    packed: bool = True
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def boundaries(self, tokenizer: Tokenizer) -> Boundaries | None:
        """What ends of documents mean; None where they mean nothing. Raises DataError without an end token."""
        if not (self.reset_positions or self.reset_attention or self.mask_loss):
            return None
        end = tokenizer.special.need("eos")
        return Boundaries(end, self.reset_positions, self.reset_attention, self.mask_loss)


@dataclass(frozen=True)
class Corpus:
    """What a trainer reads.

    train, heldout: samples by number; held-out ones in a fixed order that no seed changes, None where the split holds
    nothing out.
    collate: makes a micro-batch of such samples. vocab_size: rows of the embedding, at least tokenizer.size.
    notes: what people should know, such as records that were passed over. contents, heldout_contents: of both sides.
    """

    train: Samples
    heldout: Samples | None
    tokenizer: Tokenizer
    vocab_size: int
    collate: Collate
    _stores: Both | None
    notes: tuple[str, ...] = ()
    contents: tuple[Content, ...] = ()
    heldout_contents: tuple[Content, ...] = ()
    _on_course: Callable[[Course], Samples] | None = None

    def on_course(self, course: Course) -> Corpus:
        """The same with the training samples that follow where a run's data changed on the way."""
        assert self._on_course is not None
        return replace(self, train=self._on_course(course))

    def unigram_entropy(self) -> Unigram:
        """Counted over all tokens of both sides, end tokens included; of random tokens it is known.

        Raises DataError for a stream, whose tokens nobody has counted.
        """
        import numpy as np

        if self._stores is None:
            if not isinstance(self.tokenizer, MockTokenizer):
                raise DataError("the tokens of a streamed dataset are not counted; prepare a file of it")
            known = float(np.log(len(self.tokenizer.ordinary_ids)))
            return Unigram(known, known)
        train = self._stores.train.counts(self.vocab_size)
        share = train[train > 0] / train.sum()
        entropy = float(-(share * np.log(share)).sum())
        if self._stores.heldout is None:
            return Unigram(entropy, float("nan"))
        heldout = self._stores.heldout.counts(self.vocab_size)
        smooth = (train + 1) / (train.sum() + len(train))
        return Unigram(entropy, float(-(heldout * np.log(smooth)).sum() / heldout.sum()))


def build(
    kind: str,
    *,
    data_path: Sequence[str] = ("builtin",),
    eval_data_path: Sequence[str] | None = None,
    split: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int,
    seq_length: int,
    seed: int,
    mlm_probability: float = 0.15,
    packing: Packing | None = None,
    skip_bad: bool = False,
    hf_dataset: str | None = None,
    tasks: TaskData | None = None,
    text_field: str = FIELD,
) -> Corpus:
    """Open, check, tokenise and cut a corpus; the slow parts are made once and kept in the cache folder.

    kind: ``moe`` (a decoder) or ``ernie``. data_path: builtin, mock, or files, folders and prefixes of indexed files,
    one after the other, or weights and paths in turn.
    eval_data_path: held-out data; without it documents are held out by ``split`` (default DEFAULT_SPLIT), none where
        its second share is 0.
    tokenizer_model: a sentencepiece model, a tokenizer.json or a Hugging Face folder; without it one of
    vocab_size ids is trained on the training documents. seq_length: S. seed: of order and masks.
    packing: of a decoder's documents. skip_bad: broken records are passed over, and counted in ``notes``.
    tasks: the objectives of ERNIE 3.0 in place of masked words and sentence order.
    hf_dataset: a ``datasets`` source in place of data_path, streamed.
    text_field: of JSONL records and columns of parquet files and datasets, the one that holds the document.
    Any number of processes may call this at once. Raises DataError for what is wrong with the data and
    ConfigError where the tokenizer has more ids than ``vocab_size``.
    """
    packing = packing or Packing()
    if kind not in KINDS:
        raise ValueError(f"the kind is {kind!r}, not one of {KINDS}")
    if kind == ERNIE and packing != Packing():
        raise ValueError("packing is a decoder's")
    if kind == ERNIE and seq_length < SHORTEST_SEQUENCE:
        raise DataError(f"sentence pairs need a --seq-length of at least {SHORTEST_SEQUENCE}, not {seq_length}")
    halves = Split.parse(split or DEFAULT_SPLIT)
    cut = _Cut(kind, seq_length, packing, seed, mlm_probability, tasks, halves)
    if hf_dataset is not None:
        return _streamed(hf_dataset, text_field, halves, tokenizer_model, vocab_size, cut)
    if _is_mock(data_path, eval_data_path):
        tokenizer = load_tokenizer(tokenizer_model) if tokenizer_model else MockTokenizer(vocab_size)
        _check_size(tokenizer, tokenizer_model, vocab_size)
        made = cut.corpus(cut.mock(tokenizer, seed, "train"), cut.mock(tokenizer, 0, "heldout"), tokenizer, vocab_size)
        return replace(made, contents=(Content("mock, random tokens", None, None, None),))
    told: list[str] = []
    data = _Data.open(data_path, eval_data_path, halves, skip_bad, text_field, told.append)
    tokenizer = load_tokenizer(tokenizer_model) if tokenizer_model else data.own_tokenizer(vocab_size)
    _check_size(tokenizer, tokenizer_model, vocab_size)
    ids = tokenizer.size if tokenizer_model else vocab_size  # an own one knows nothing of indexed files
    sides = open_sides(data.train, data.heldout, halves, tokenizer, ids, skip_bad=skip_bad)
    train, contents = cut.pieces(sides[0], data.train, held_out=False)
    heldout, aside = (None, ()) if sides[1] is None else cut.pieces(sides[1], data.heldout or data.train, held_out=True)
    notes = tuple(dict.fromkeys([*told, *(note for side in sides if side is not None for note in side.notes)]))
    both = Both(_counted(sides[0]), None if sides[1] is None else _counted(sides[1]))
    made = cut.corpus(train, heldout, tokenizer, vocab_size, both, notes)
    return replace(made, contents=contents, heldout_contents=aside)


def _counted(side: Side) -> TokenStore | Side:
    """One store is counted by itself, several by their weights."""
    return side.stores[0] if len(side.stores) == 1 else side


def _streamed(name: str, field: str, split: Split, tokenizer_model: str | None, vocab_size: int, cut: _Cut) -> Corpus:
    if tokenizer_model:
        tokenizer = load_tokenizer(tokenizer_model)
    else:
        rows = open_dataset(name, field=field)
        first = split.cuts(len(rows))[0]
        documents = (rows[i][field] for i in range(first))
        read_as = () if field == FIELD else (field,)
        tokenizer = _trained((text for text in documents if text), vocab_size, name, str(rows._fingerprint), *read_as)
    _check_size(tokenizer, tokenizer_model, vocab_size)
    train, heldout = cut.rows(name, field, split, tokenizer)
    made = cut.corpus(train, heldout, tokenizer, vocab_size)
    return replace(made, contents=(Content(f"{name}, streamed", None, None, len(train)),))


def _is_mock(data_path: Sequence[str], eval_data_path: Sequence[str] | None) -> bool:
    if list(data_path) != [MOCK]:
        return False
    if eval_data_path and list(eval_data_path) != [MOCK]:
        raise DataError("--data-path mock holds out random tokens of its own; leave --eval-data-path out")
    return True


class _Data(NamedTuple):
    """The parts of a corpus. heldout: parts of their own, or None where ``split`` decides."""

    train: tuple[Part, ...]
    heldout: tuple[Part, ...] | None
    split: Split
    skip_bad: bool

    @classmethod
    def open(
        cls,
        data_path: Sequence[str],
        eval_data_path: Sequence[str] | None,
        split: Split,
        skip_bad: bool,
        field: str,
        say: Callable[[str], object],
    ) -> _Data:
        heldout = open_parts(eval_data_path, field, say) if eval_data_path else None
        return cls(open_parts(data_path, field, say), heldout, split, skip_bad)

    def own_tokenizer(self, vocab_size: int) -> Tokenizer:
        """One of ``vocab_size`` ids trained on the training documents, once; of indexed files alone there is none."""
        sources = tuple(source for part in self.train for source in part.sources)
        indexed = [part.name for part in (*self.train, *(self.heldout or ())) if part.indexed]
        if indexed and (sources or any(part.sources for part in self.heldout or ())):
            raise DataError(
                f"{indexed[0]} holds tokens of a tokenizer that was chosen before, and text beside it must be "
                "tokenised by the same one; give --tokenizer-model"
            )
        if indexed:
            return NoTokenizer(vocab_size)
        apart = "apart" if self.heldout else repr(self.split.train)
        names = ", ".join(source.name for source in sources)
        key = (sources_hash(sources), apart, str(LONGEST_LINE))
        return _trained(self._training_documents(sources), vocab_size, names, *key)

    def _training_documents(self, sources: Sequence[Source]) -> Iterator[str]:
        documents = all_documents(sources, BadRecords(stops=not self.skip_bad))
        return documents if self.heldout else (text for text in documents if self.split.side(text) == 0)


def _trained(documents: Iterator[str], vocab_size: int, names: str, *key: str) -> Tokenizer:
    """The tokenizer trained on these documents, from the cache where it is there."""
    import sentencepiece

    from megapar.data.sentencepiece_tokenizer import TRAINING_VERSION, SentencePieceTokenizer, train

    content, *more = key
    entry = digest(str(TRAINING_VERSION), sentencepiece.__version__, content, str(vocab_size), *more)

    def make(path: Path) -> None:
        first = next(documents, None)
        if first is None:
            raise DataError(f"{names}: the corpus holds no documents to train on")
        path.write_bytes(train(chain([first], documents), vocab_size))

    path = made_once(f"tokenizers/{entry}.model", make)
    return SentencePieceTokenizer(path.read_bytes(), name=str(path))


def _check_size(tokenizer: Tokenizer, name: str | None, vocab_size: int) -> None:
    if tokenizer.size > vocab_size:
        raise ConfigError([too_large(name, tokenizer.size, vocab_size)])


@dataclass(frozen=True)
class _Cut:
    """How stores become samples."""

    kind: str
    seq_length: int
    packing: Packing
    seed: int
    mlm_probability: float
    tasks: TaskData | None
    split: Split

    def pieces(self, side: Side, parts: Sequence[Part], *, held_out: bool) -> tuple[Pieces, tuple[Content, ...]]:
        """What the samples of one side are made from, and what it holds. parts: where its stores are from, in order."""
        pieces = [self._of_store(store, held_out) for store in side.stores]
        contents = contents_of(parts, side, pieces)
        return (pieces[0] if len(pieces) == 1 else Blend(pieces, side.weights)), contents

    def _of_store(self, store: TokenStore, held_out: bool) -> Pieces:
        if self.kind == ERNIE:
            return Spans(store, self.seq_length - PAIR_MARKS)
        if not self.packing.packed:
            return DocumentWindows(store, self.seq_length)
        return Windows(store, self.seq_length, shortest=2 if held_out else None)

    def rows(self, name: str, field: str, split: Split, tokenizer: Tokenizer) -> tuple[Pieces, Pieces | None]:
        """Pieces of both sides of a streamed dataset."""
        length = self.seq_length

        def make(rows: Any, first: int, last: int) -> RowSpans | RowWindows:
            if self.kind == ERNIE:
                return RowSpans(rows, first, last, tokenizer, name, field, length - PAIR_MARKS)
            return RowWindows(rows, first, last, tokenizer, name, field, length)

        return both_sides(name, field, split, make)

    def mock(self, tokenizer: Tokenizer, seed: int, stream: str) -> Pieces:
        """Random pieces; of a decoder that knows documents, with end tokens in them."""
        longest = self.seq_length + 1
        shortest, ids, end = longest, tokenizer.ordinary_ids, None
        if self.kind == ERNIE:
            longest = self.seq_length - PAIR_MARKS
            shortest = max(2, longest // 2)
        elif not self.packing.packed:
            shortest = min(longest, 2 + self.seq_length // 2)
        else:
            boundaries = self.packing.boundaries(tokenizer)
            end = boundaries.end if boundaries else None
        return RandomPieces(ids, shortest, longest, seed, stream, end=end)

    def corpus(
        self,
        train: Pieces,
        heldout: Pieces | None,
        tokenizer: Tokenizer,
        vocab_size: int,
        stores: Both | None = None,
        notes: tuple[str, ...] = (),
    ) -> Corpus:
        """Samples of both sides, and all around them."""
        made = self._corpus(train, heldout, tokenizer, vocab_size, stores, notes)

        def on_course(course: Course) -> Samples:
            return self._corpus(Coursed(train, course), heldout, tokenizer, vocab_size, stores, notes).train

        return replace(made, _on_course=on_course)

    def _corpus(
        self,
        train: Pieces,
        heldout: Pieces | None,
        tokenizer: Tokenizer,
        vocab_size: int,
        stores: Both | None,
        notes: tuple[str, ...],
    ) -> Corpus:
        if self.tasks is not None:
            sides = self.tasks.sides(train, heldout, tokenizer, self.seq_length, self.seed, self.split)  # type: ignore[arg-type]
            return Corpus(*sides, tokenizer, vocab_size, partial(collate_tasks, names=self.tasks.names), stores, notes)
        held_out = None if heldout is None else self._samples(heldout, tokenizer, None)
        collate = collate_ernie if self.kind == ERNIE else collate_decoder
        samples = self._samples(train, tokenizer, self.seed)
        return Corpus(samples, held_out, tokenizer, vocab_size, collate, stores, notes)

    def _samples(self, pieces: Pieces, tokenizer: Tokenizer, seed: int | None) -> Samples:
        if self.kind == ERNIE:
            return ErnieSamples(pieces, self.seq_length, tokenizer, self.mlm_probability, seed)
        return DecoderSamples(pieces, self.seq_length, seed, self.packing.boundaries(tokenizer))
