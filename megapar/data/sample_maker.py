"""The makers of samples: from a corpus to token pieces, and from pieces to the samples of a decoder or of ERNIE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from typing import Generic, TypeVar

from megapar.data.batches import Collate, collate_decoder, collate_ernie
from megapar.data.blend import BlendSource
from megapar.data.sampling.data_phases import PhasedPieces, PhasedSamples, Phases
from megapar.data.sampling.ernie import PAIR_MARKS, ErnieSamples, Spans
from megapar.data.sampling.mixture import Blend
from megapar.data.sampling.samples import (
    Boundaries,
    DecoderSamples,
    DocumentPieces,
    DocumentWindows,
    RandomPieces,
    Samples,
    TokenPieces,
    Windows,
)
from megapar.data.sampling.streaming import RowSpans, RowWindows, StreamedRows, split_rows
from megapar.data.tasks.build import TaskData, collate_tasks
from megapar.data.text.source import BUILTIN, TEXT_FILE
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.store import StoreBlend, TokenStore

CONVERSATIONS = "conversations"
MOST_NAMES = 3  # file names of one corpus that are shown


@dataclass(frozen=True)
class Content:
    """Counts of the training or the held-out documents of one corpus for the log; None where they are not counted.

    ``samples`` are those of one epoch, ``weight`` is that in a mixture, ``what`` the documents are, ``cut_files`` of
    text are cut at blank lines.
    """

    name: str
    documents: int | None
    tokens: int | None
    samples: int | None
    weight: Fraction | None = None
    what: str = "documents"
    cut_files: int = 0

    @property
    def mean(self) -> float | None:
        """Tokens of a document on average."""
        return self.tokens / self.documents if self.tokens is not None and self.documents else None

    def __str__(self) -> str:
        shows_mean = self.mean is not None and self.what != CONVERSATIONS
        what = f"{self.what} of {self.mean:,.0f} tokens on average" if shows_mean else self.what
        counts = [(self.documents, what), (self.tokens, "tokens")]
        counts += [(self.samples, "packs")] if self.what == CONVERSATIONS else []
        counted = [f"{count:,} {unit}" for count, unit in counts if count is not None]
        weight = [] if self.weight is None else [f"weight {float(self.weight):g}"]
        return f"{self.name}: {', '.join([*counted, *weight]) or 'not counted'}"


def contents_of(sources: Sequence[BlendSource], blend: StoreBlend, pieces: Sequence[Sized]) -> tuple[Content, ...]:
    """Return the counts of every store of a blend. ``sources`` and ``pieces`` are in the order of the stores."""
    rows = zip(sources, blend.stores, pieces, strict=True)
    return tuple(
        Content(_name(one), store.documents, len(store.tokens), len(piece), one.weight, cut_files=one.count(TEXT_FILE))
        for one, store, piece in rows
    )


def _name(source: BlendSource) -> str:
    label = f"{source.label}=" if source.label else ""
    if source.indexed is not None:
        return f"{label}{source.name} (.bin/.idx)"
    names = [
        "the built-in text, Python's documentation" if text.name == BUILTIN else text.name for text in source.sources
    ]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    files = f" ({len(names)} files)" if len(names) > 1 else ""
    return f"{label}{', '.join(names[:MOST_NAMES])}{more}{files}"


P = TypeVar("P", TokenPieces, DocumentPieces)


@dataclass(frozen=True)
class MadeSamples:
    """The samples of a corpus.

    Attributes:
        heldout: Held-out samples, in an order that does not depend on the seed; None if there are none.
        contents: Counts of each training corpus.
        phased: Makes the training samples of a run whose data changes, from a phase on.
        heldout_sets: Held-out samples of each named source of evaluation data.
    """

    train: Samples
    heldout: Samples | None
    contents: tuple[Content, ...] = ()
    heldout_contents: tuple[Content, ...] = ()
    phased: Callable[[Phases, int], PhasedSamples] | None = None
    heldout_sets: Mapping[str, Samples] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleMaker(ABC, Generic[P]):
    """Makes the samples of one kind of model, of S = ``seq_length`` positions, from any corpus."""

    seq_length: int
    seed: int
    split: Split

    @property
    @abstractmethod
    def collate(self) -> Collate:
        """The function that makes a micro-batch of samples."""

    @abstractmethod
    def of_store(self, store: TokenStore, *, held_out: bool) -> P:
        """Return the pieces of a token store."""

    @abstractmethod
    def of_rows(self, rows: StreamedRows) -> P:
        """Return the pieces of rows of a streamed dataset."""

    @abstractmethod
    def random(self, tokenizer: Tokenizer, seed: int, stream: str) -> P:
        """Return pieces of random ids."""

    @abstractmethod
    def samples_of(self, pieces: P, tokenizer: Tokenizer, seed: int | None) -> Samples:
        """Return the samples of one side; ``seed`` is None for held-out ones."""

    def samples(self, pieces: TrainHeldout[P], tokenizer: Tokenizer) -> TrainHeldout[Samples]:
        """Return the samples that are made from these pieces."""
        train = self.samples_of(pieces.train, tokenizer, self.seed)
        return TrainHeldout(train, None if pieces.heldout is None else self.samples_of(pieces.heldout, tokenizer, None))

    def blended(
        self, stores: TrainHeldout[StoreBlend], sources: TrainHeldout[tuple[BlendSource, ...]], tokenizer: Tokenizer
    ) -> MadeSamples:
        """Return the samples of token stores. ``sources`` are in the order of the stores."""
        train, contents = self._pieces(stores.train, sources.train, held_out=False)

        @cache
        def parts(seq_length: int) -> list[P]:
            maker = replace(self, seq_length=seq_length)
            return [maker.of_store(store, held_out=False) for store in stores.train.stores]

        heldout: P | None = None
        heldout_contents: tuple[Content, ...] = ()
        if stores.heldout is not None:
            heldout, heldout_contents = self._pieces(stores.heldout, sources.heldout or sources.train, held_out=True)
        made = self._made(TrainHeldout(train, heldout), tokenizer, contents, heldout_contents, parts)
        if stores.heldout is None or not sources.heldout or not sources.heldout[0].label:
            return made
        sets = {}
        for source, store in zip(sources.heldout, stores.heldout.stores, strict=True):
            pieces = TrainHeldout(train, self.of_store(store, held_out=True))
            sets[source.label] = self.samples(pieces, tokenizer).heldout
        return replace(made, heldout_sets={name: samples for name, samples in sets.items() if samples is not None})

    def streamed(self, name: str, field: str, tokenizer: Tokenizer) -> MadeSamples:
        """Return the samples of a streamed dataset. Raises DataError if it cannot be read."""
        pieces = split_rows(name, field, self.split, tokenizer, self.of_rows)
        return self._made(pieces, tokenizer, (Content(f"{name}, streamed", None, None, len(pieces.train)),))

    def mock(self, tokenizer: Tokenizer) -> MadeSamples:
        """Return the samples of random ids. Those that are held out do not depend on the seed."""
        pieces = TrainHeldout(self.random(tokenizer, self.seed, "train"), self.random(tokenizer, 0, "heldout"))
        return self._made(pieces, tokenizer, (Content("mock, random tokens", None, None, None),))

    def from_pieces(
        self, pieces: TrainHeldout[P], tokenizer: Tokenizer, contents: TrainHeldout[tuple[Content, ...]]
    ) -> MadeSamples:
        """Return the samples of pieces that the caller makes."""
        return self._made(pieces, tokenizer, contents.train, contents.heldout or ())

    def _pieces(
        self, blend: StoreBlend, sources: Sequence[BlendSource], *, held_out: bool
    ) -> tuple[P, tuple[Content, ...]]:
        """Return the pieces of a blend, and the counts of each store."""
        pieces = [self.of_store(store, held_out=held_out) for store in blend.stores]
        contents = contents_of(sources, blend, pieces)
        return (pieces[0] if len(pieces) == 1 else Blend(pieces, blend.weights)), contents

    def _made(
        self,
        pieces: TrainHeldout[P],
        tokenizer: Tokenizer,
        contents: tuple[Content, ...],
        heldout_contents: tuple[Content, ...] = (),
        parts: Callable[[int], Sequence[P]] | None = None,
    ) -> MadeSamples:
        """Return the samples of pieces. ``parts``: returns the pieces of each source for a length of samples."""
        samples = self.samples(pieces, tokenizer)

        def phased(phases: Phases, first: int) -> PhasedSamples:
            read, sizes = list[Samples](), dict[str, int]()
            for number, phase in enumerate(phases[first:], first):
                train, maker = pieces.train, replace(self, seq_length=phase.seq_length or self.seq_length)
                if phase.parts is not None and parts is not None:
                    own = [parts(maker.seq_length)[part] for part in phase.parts]
                    train = own[0] if len(own) == 1 else Blend(own, phase.weights)
                ordered = PhasedPieces(train, phases[: number + 1])
                sizes.update(ordered.sizes)
                read.append(maker.samples(replace(pieces, train=ordered), tokenizer).train)
            return PhasedSamples(phases, read, sizes)

        return MadeSamples(samples.train, samples.heldout, contents, heldout_contents, phased)


@dataclass(frozen=True)
class Packing:
    """Options for the samples of a decoder.

    Attributes:
        packed: True joins documents into full samples; False makes each sample of one document or a piece of it, and
            pads it.
        reset_positions: See ``samples.Boundaries``, also for the next two.
        reset_attention: Keep attention inside documents.
        mask_loss: No loss across the end of a document.
        conversations: Documents are conversations, whose ends no token marks, and which are apart in attention and
            positions.
    """

    packed: bool = True
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False
    conversations: bool = False

    def boundaries(self, tokenizer: Tokenizer) -> Boundaries | None:
        """Return the effects of document ends; None if they have none. Raises DataError without an end token."""
        if self.conversations:
            return Boundaries(None, reset_positions=True, reset_attention=True)
        if not (self.reset_positions or self.reset_attention or self.mask_loss):
            return None
        end = tokenizer.special.need("eos")
        return Boundaries(end, self.reset_positions, self.reset_attention, self.mask_loss)


@dataclass(frozen=True)
class DecoderSampleMaker(SampleMaker[TokenPieces]):
    """Makes samples for a causal model. ``packing`` says how documents become samples."""

    packing: Packing = Packing()

    @property
    def collate(self) -> Collate:
        return collate_decoder

    def of_store(self, store: TokenStore, *, held_out: bool) -> TokenPieces:
        """See SampleMaker. Held-out pieces may be shorter than a sample."""
        if not self.packing.packed:
            return DocumentWindows(store, self.seq_length)
        return Windows(store, self.seq_length, shortest=2 if held_out else None)

    def of_rows(self, rows: StreamedRows) -> TokenPieces:
        return RowWindows(rows, self.seq_length)

    def random(self, tokenizer: Tokenizer, seed: int, stream: str) -> TokenPieces:
        """See SampleMaker. The pieces contain end tokens if the samples depend on document ends."""
        ids, longest = tokenizer.ordinary_ids, self.seq_length + 1
        if not self.packing.packed:
            return RandomPieces(ids, min(longest, 2 + self.seq_length // 2), longest, seed, stream)
        boundaries = self.packing.boundaries(tokenizer)
        return RandomPieces(ids, longest, longest, seed, stream, end=boundaries.end if boundaries else None)

    def samples_of(self, pieces: TokenPieces, tokenizer: Tokenizer, seed: int | None) -> Samples:
        return DecoderSamples(pieces, self.seq_length, seed, self.packing.boundaries(tokenizer))


@dataclass(frozen=True)
class ErnieSampleMaker(SampleMaker[DocumentPieces]):
    """Makes samples for ERNIE. ``tasks`` are the objectives of ERNIE 3.0, in place of masked words and their order."""

    mlm_probability: float = 0.15
    tasks: TaskData | None = None

    @property
    def collate(self) -> Collate:
        return collate_ernie if self.tasks is None else partial(collate_tasks, names=self.tasks.names)

    def of_store(self, store: TokenStore, *, held_out: bool) -> DocumentPieces:
        return Spans(store, self._longest)

    def of_rows(self, rows: StreamedRows) -> DocumentPieces:
        return RowSpans(rows, self._longest)

    def random(self, tokenizer: Tokenizer, seed: int, stream: str) -> DocumentPieces:
        return RandomPieces(tokenizer.ordinary_ids, max(2, self._longest // 2), self._longest, seed, stream)

    def samples_of(self, pieces: DocumentPieces, tokenizer: Tokenizer, seed: int | None) -> Samples:
        return ErnieSamples(pieces, self.seq_length, tokenizer, self.mlm_probability, seed)

    def samples(self, pieces: TrainHeldout[DocumentPieces], tokenizer: Tokenizer) -> TrainHeldout[Samples]:
        if self.tasks is not None:
            return self.tasks.samples(pieces, tokenizer, self.seq_length, self.seed, self.split)
        return super().samples(pieces, tokenizer)

    @property
    def _longest(self) -> int:
        """Most ids of a piece: a sample without the marks of its pair."""
        return self.seq_length - PAIR_MARKS


Maker = DecoderSampleMaker | ErnieSampleMaker
