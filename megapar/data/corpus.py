"""A corpus that is ready for training: training and held-out samples, and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from megapar.config.record import FIELD, LONGEST_LINE
from megapar.config.vocabulary import too_large
from megapar.data.batches import Collate, collate_decoder, collate_ernie
from megapar.data.blend import BlendSource, open_blend, open_stores
from megapar.data.contents import Content, contents_of
from megapar.data.sampling.course import Course, Coursed
from megapar.data.sampling.ernie import SHORTEST_SEQUENCE, ErnieSamples, Spans
from megapar.data.sampling.frame import PAIR_MARKS
from megapar.data.sampling.mixture import Blend
from megapar.data.sampling.mock import MockTokenizer, RandomPieces
from megapar.data.sampling.samples import Boundaries, DecoderSamples, DocumentWindows, Samples, TokenPieces, Windows
from megapar.data.sampling.streaming import RowSpans, RowWindows, open_dataset, split_rows
from megapar.data.tasks.build import TaskData
from megapar.data.tasks.samples import collate_tasks
from megapar.data.tasks.task import DocumentPieces
from megapar.data.text.bad_records import BadRecords
from megapar.data.text.source import MOCK, all_documents, sources_hash
from megapar.data.tokenizers.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from megapar.data.tokens.cache import digest, made_once
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.store import StoreBlend, TokenStore
from megapar.data.tokens.token_cache import TokenCache
from megapar.errors import ConfigError, DataError

ERNIE = "ernie"
KINDS = ("moe", ERNIE)
DEFAULT_SPLIT = "95,5"


@dataclass(frozen=True)
class Packing:
    """Options for the samples of a decoder.

    Attributes:
        packed: True joins documents into full samples; False makes each sample of one document or a piece of it, and
            pads it.
        reset_positions: see ``samples.Boundaries``, also for the next two.
        reset_attention: keep attention inside documents.
        mask_loss: no loss across the end of a document.
    """

    packed: bool = True
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def boundaries(self, tokenizer: Tokenizer) -> Boundaries | None:
        """Return the effects of document ends; None if they have none. Raises DataError without an end token."""
        if not (self.reset_positions or self.reset_attention or self.mask_loss):
            return None
        end = tokenizer.special.need("eos")
        return Boundaries(end, self.reset_positions, self.reset_attention, self.mask_loss)


@dataclass(frozen=True)
class Corpus:
    """The data of a trainer.

    Attributes:
        train: training samples by number.
        heldout: held-out samples by number, in an order that does not depend on the seed; None if there are none.
        tokenizer: the tokenizer that made the tokens.
        vocab_size: rows of the embedding, at least tokenizer.size.
        collate: makes a micro-batch of samples.
        stores: the tokens that samples are cut from; None for random tokens and for a streamed dataset.
        notes: messages for the log, such as records that were skipped.
        contents: counts of each training corpus.
        heldout_contents: counts of each held-out corpus.
    """

    train: Samples
    heldout: Samples | None
    tokenizer: Tokenizer
    vocab_size: int
    collate: Collate
    stores: TrainHeldout[StoreBlend] | None = None
    notes: tuple[str, ...] = ()
    contents: tuple[Content, ...] = ()
    heldout_contents: tuple[Content, ...] = ()
    _on_course: Callable[[Course], Samples] | None = None

    def on_course(self, course: Course) -> Corpus:
        """Return this corpus with the training samples of a run whose data changed on the way."""
        assert self._on_course is not None
        return replace(self, train=self._on_course(course))


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
    """Open, check, tokenize and cut a corpus. Slow work is done once and kept in the cache folder.

    Any number of processes may call this at once. Raises DataError if the data is broken, and ConfigError if the
    tokenizer has more ids than ``vocab_size``.

    Args:
        kind: ``moe`` (a decoder) or ``ernie``.
        data_path: builtin, mock, or a list of files, folders and prefixes of indexed files, each optionally preceded
            by its weight.
        eval_data_path: held-out data; without it, ``split`` holds documents out.
        split: shares of training and held-out documents (default DEFAULT_SPLIT); a second share of 0 holds none out.
        tokenizer_model: a sentencepiece model, a tokenizer.json or a Hugging Face folder; without it, a tokenizer of
            ``vocab_size`` ids is trained on the training documents.
        vocab_size: rows of the embedding.
        seq_length: S, the positions of a sample.
        seed: seed of the order of samples and of masks.
        mlm_probability: share of the words that ERNIE masks.
        packing: options for a decoder's samples.
        skip_bad: skip broken records and count them in ``notes``.
        hf_dataset: a ``datasets`` source that is streamed, in place of data_path.
        tasks: the objectives of ERNIE 3.0, in place of masked words and sentence order.
        text_field: the JSONL field or the column that contains the document.
    """
    packing = packing or Packing()
    if kind not in KINDS:
        raise ValueError(f"the kind is {kind!r}, not one of {KINDS}")
    if kind == ERNIE and packing != Packing():
        raise ValueError("packing applies only to a decoder")
    if kind == ERNIE and seq_length < SHORTEST_SEQUENCE:
        raise DataError(f"sentence pairs need a --seq-length of at least {SHORTEST_SEQUENCE}, not {seq_length}")
    halves = Split.parse(split or DEFAULT_SPLIT)
    maker = _SampleMaker(kind, seq_length, packing, seed, mlm_probability, tasks, halves)
    if hf_dataset is not None:
        return _streamed(hf_dataset, text_field, halves, tokenizer_model, vocab_size, maker)
    if _is_mock(data_path, eval_data_path):
        tokenizer = load_tokenizer(tokenizer_model) if tokenizer_model else MockTokenizer(vocab_size)
        _check_size(tokenizer, tokenizer_model, vocab_size)
        pieces = TrainHeldout(maker.mock(tokenizer, seed, "train"), maker.mock(tokenizer, 0, "heldout"))
        made = maker.corpus(pieces, tokenizer, vocab_size)
        return replace(made, contents=(Content("mock, random tokens", None, None, None),))
    skipped: list[str] = []
    train_data = open_blend(data_path, text_field, skipped.append)
    heldout_data = open_blend(eval_data_path, text_field, skipped.append) if eval_data_path else None
    data = TrainHeldout(train_data, heldout_data)
    tokenizer, path = (
        (load_tokenizer(tokenizer_model), Path(tokenizer_model))
        if tokenizer_model
        else _own_tokenizer(data, halves, vocab_size, skip_bad)
    )
    _check_size(tokenizer, tokenizer_model, vocab_size)
    ids = tokenizer.size if tokenizer_model else vocab_size  # indexed files were not made by a tokenizer trained here
    stores = open_stores(data, halves, TokenCache(tokenizer, path, skip_bad), ids)
    train, contents = maker.pieces(stores.train, data.train, held_out=False)
    heldout, heldout_contents = None, tuple[Content, ...]()
    if stores.heldout is not None:
        heldout, heldout_contents = maker.pieces(stores.heldout, data.heldout or data.train, held_out=True)
    made = maker.corpus(TrainHeldout(train, heldout), tokenizer, vocab_size)
    notes = (*skipped, *stores.train.notes, *(stores.heldout.notes if stores.heldout else ()))
    unique = tuple(dict.fromkeys(notes))
    return replace(made, stores=stores, notes=unique, contents=contents, heldout_contents=heldout_contents)


def _streamed(
    name: str, field: str, split: Split, tokenizer_model: str | None, vocab_size: int, maker: _SampleMaker
) -> Corpus:
    if tokenizer_model:
        tokenizer = load_tokenizer(tokenizer_model)
    else:
        rows = open_dataset(name, field=field)
        first = split.cuts(len(rows))[0]
        documents = (rows[i][field] for i in range(first))
        read_as = () if field == FIELD else (field,)
        texts = (text for text in documents if text)
        tokenizer, _ = _trained(texts, vocab_size, name, str(rows._fingerprint), *read_as)
    _check_size(tokenizer, tokenizer_model, vocab_size)
    pieces = maker.streamed(name, field, split, tokenizer)
    made = maker.corpus(pieces, tokenizer, vocab_size)
    return replace(made, contents=(Content(f"{name}, streamed", None, None, len(pieces.train)),))


def _is_mock(data_path: Sequence[str], eval_data_path: Sequence[str] | None) -> bool:
    if list(data_path) != [MOCK]:
        return False
    if eval_data_path and list(eval_data_path) != [MOCK]:
        raise DataError("--data-path mock holds out random tokens itself; leave --eval-data-path out")
    return True


def _own_tokenizer(
    data: TrainHeldout[tuple[BlendSource, ...]], split: Split, vocab_size: int, skip_bad: bool
) -> tuple[Tokenizer, Path | None]:
    """Train a tokenizer of ``vocab_size`` ids on the training documents, once; return it and its file.

    Without text, returns NoTokenizer and None. Raises DataError if text is mixed with indexed files.
    """
    everything = (*data.train, *(data.heldout or ()))
    indexed = [source.name for source in everything if source.indexed]
    if indexed and any(source.sources for source in everything):
        raise DataError(
            f"{indexed[0]} contains tokens of an existing tokenizer, and the text next to it must be tokenized with "
            "the same one; set --tokenizer-model to that tokenizer"
        )
    if indexed:
        return NoTokenizer(vocab_size), None
    sources = tuple(text for source in data.train for text in source.sources)
    apart = "apart" if data.heldout else repr(split.train)
    names = ", ".join(source.name for source in sources)
    documents = all_documents(sources, BadRecords(stops=not skip_bad))
    if not data.heldout:
        documents = (text for text in documents if split.side(text) == 0)
    return _trained(documents, vocab_size, names, sources_hash(sources), apart, str(LONGEST_LINE))


def _trained(documents: Iterator[str], vocab_size: int, names: str, *key: str) -> tuple[Tokenizer, Path]:
    """Return the tokenizer trained on these documents, from the cache if it is there, and its file."""
    import sentencepiece

    from megapar.data.tokenizers.sentencepiece_tokenizer import TRAINING_VERSION, SentencePieceTokenizer, train

    content, *more = key
    entry = digest(str(TRAINING_VERSION), sentencepiece.__version__, content, str(vocab_size), *more)

    def make(path: Path) -> None:
        first = next(documents, None)
        if first is None:
            raise DataError(f"{names}: the corpus contains no documents to train on")
        path.write_bytes(train(chain([first], documents), vocab_size))

    path = made_once(f"tokenizers/{entry}.model", make)
    return SentencePieceTokenizer(path.read_bytes(), name=str(path)), path


def _check_size(tokenizer: Tokenizer, name: str | None, vocab_size: int) -> None:
    if tokenizer.size > vocab_size:
        raise ConfigError([too_large(name, tokenizer.size, vocab_size)])


@dataclass(frozen=True)
class _SampleMaker:
    """Makes samples from token stores; its attributes are the arguments of ``build``."""

    kind: str
    seq_length: int
    packing: Packing
    seed: int
    mlm_probability: float
    tasks: TaskData | None
    split: Split

    def pieces(
        self, blend: StoreBlend, sources: Sequence[BlendSource], *, held_out: bool
    ) -> tuple[TokenPieces, tuple[Content, ...]]:
        """Return the pieces that samples are made from, and the counts of each store.

        ``sources`` are in the order of the stores.
        """
        pieces = [self._of_store(store, held_out) for store in blend.stores]
        contents = contents_of(sources, blend, pieces)
        return (pieces[0] if len(pieces) == 1 else Blend(pieces, blend.weights)), contents

    def _of_store(self, store: TokenStore, held_out: bool) -> TokenPieces:
        if self.kind == ERNIE:
            return Spans(store, self.seq_length - PAIR_MARKS)
        if not self.packing.packed:
            return DocumentWindows(store, self.seq_length)
        return Windows(store, self.seq_length, shortest=2 if held_out else None)

    def streamed(self, name: str, field: str, split: Split, tokenizer: Tokenizer) -> TrainHeldout[TokenPieces]:
        """Return the pieces of a streamed dataset."""
        length = self.seq_length

        def make(rows: Any, first: int, last: int) -> TokenPieces:
            if self.kind == ERNIE:
                return RowSpans(rows, first, last, tokenizer, name, field, length - PAIR_MARKS)
            return RowWindows(rows, first, last, tokenizer, name, field, length)

        return split_rows(name, field, split, make)

    def mock(self, tokenizer: Tokenizer, seed: int, stream: str) -> TokenPieces:
        """Return random pieces, with end tokens in them if the decoder's samples depend on document ends."""
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

    def corpus(self, pieces: TrainHeldout[TokenPieces], tokenizer: Tokenizer, vocab_size: int) -> Corpus:
        """Return the corpus whose samples are made from these pieces."""
        samples = self._samples(pieces, tokenizer)
        collate = collate_ernie if self.kind == ERNIE else collate_decoder
        if self.tasks is not None:
            collate = partial(collate_tasks, names=self.tasks.names)

        def on_course(course: Course) -> Samples:
            return self._samples(replace(pieces, train=Coursed(pieces.train, course)), tokenizer).train

        return Corpus(samples.train, samples.heldout, tokenizer, vocab_size, collate, _on_course=on_course)

    def _samples(self, pieces: TrainHeldout[TokenPieces], tokenizer: Tokenizer) -> TrainHeldout[Samples]:
        if self.tasks is not None:
            documents: TrainHeldout[DocumentPieces] = pieces  # type: ignore[assignment]
            return self.tasks.samples(documents, tokenizer, self.seq_length, self.seed, self.split)
        train = self._samples_of(pieces.train, tokenizer, self.seed)
        return TrainHeldout(
            train, None if pieces.heldout is None else self._samples_of(pieces.heldout, tokenizer, None)
        )

    def _samples_of(self, pieces: TokenPieces, tokenizer: Tokenizer, seed: int | None) -> Samples:
        if self.kind == ERNIE:
            return ErnieSamples(pieces, self.seq_length, tokenizer, self.mlm_probability, seed)
        return DecoderSamples(pieces, self.seq_length, seed, self.packing.boundaries(tokenizer))
