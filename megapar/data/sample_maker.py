"""The makers of samples: from a corpus to token pieces, and from pieces to the samples of a decoder or of ERNIE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from megapar.data.batches import Collate, collate_decoder, collate_ernie
from megapar.data.blend import BlendSource
from megapar.data.contents import Content, contents_of
from megapar.data.sampling.data_phases import PhasedPieces, Phases
from megapar.data.sampling.ernie import ErnieSamples, Spans
from megapar.data.sampling.frame import PAIR_MARKS
from megapar.data.sampling.mixture import Blend
from megapar.data.sampling.mock import RandomPieces
from megapar.data.sampling.samples import (
    Boundaries,
    DecoderSamples,
    DocumentPieces,
    DocumentWindows,
    Samples,
    TokenPieces,
    Windows,
)
from megapar.data.sampling.streaming import RowSpans, RowWindows, split_rows
from megapar.data.tasks.build import TaskData
from megapar.data.tasks.samples import collate_tasks
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.store import StoreBlend, TokenStore

P = TypeVar("P", TokenPieces, DocumentPieces)


@dataclass(frozen=True)
class MadeSamples:
    """The samples of a corpus.

    Attributes:
        train: Training samples by number.
        heldout: Held-out samples by number; None if there are none.
        in_phases: Makes the training samples of a run whose data changed on the way.
        contents: Counts of each training corpus.
        heldout_contents: Counts of each held-out corpus.
    """

    train: Samples
    heldout: Samples | None
    in_phases: Callable[[Phases], Samples]
    contents: tuple[Content, ...]
    heldout_contents: tuple[Content, ...] = ()


@dataclass(frozen=True)
class SampleMaker(ABC, Generic[P]):
    """Makes the samples of one kind of model from any corpus.

    Attributes:
        seq_length: S, the positions of a sample.
        seed: Seed of the order of samples and of masks.
        split: Shares of training and held-out documents.
    """

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
    def of_rows(self, rows: Any, first: int, last: int, tokenizer: Tokenizer, name: str, field: str) -> P:
        """Return the pieces of rows first .. last - 1 of a streamed dataset."""

    @abstractmethod
    def random(self, tokenizer: Tokenizer, seed: int, stream: str) -> P:
        """Return pieces of random ids."""

    @abstractmethod
    def samples(self, pieces: TrainHeldout[P], tokenizer: Tokenizer) -> TrainHeldout[Samples]:
        """Return the samples that are made from these pieces."""

    def blended(
        self, stores: TrainHeldout[StoreBlend], sources: TrainHeldout[tuple[BlendSource, ...]], tokenizer: Tokenizer
    ) -> MadeSamples:
        """Return the samples of token stores. ``sources`` are in the order of the stores."""
        train, contents = self._pieces(stores.train, sources.train, held_out=False)
        if stores.heldout is None:
            return self._made(TrainHeldout(train, None), tokenizer, contents)
        heldout, heldout_contents = self._pieces(stores.heldout, sources.heldout or sources.train, held_out=True)
        return self._made(TrainHeldout(train, heldout), tokenizer, contents, heldout_contents)

    def streamed(self, name: str, field: str, tokenizer: Tokenizer) -> MadeSamples:
        """Return the samples of a streamed dataset. Raises DataError if it cannot be read."""

        def make(rows: Any, first: int, last: int) -> P:
            return self.of_rows(rows, first, last, tokenizer, name, field)

        pieces = split_rows(name, field, self.split, make)
        return self._made(pieces, tokenizer, (Content(f"{name}, streamed", None, None, len(pieces.train)),))

    def mock(self, tokenizer: Tokenizer) -> MadeSamples:
        """Return the samples of random ids. Those that are held out do not depend on the seed."""
        pieces = TrainHeldout(self.random(tokenizer, self.seed, "train"), self.random(tokenizer, 0, "heldout"))
        return self._made(pieces, tokenizer, (Content("mock, random tokens", None, None, None),))

    def own(self, pieces: TrainHeldout[P], tokenizer: Tokenizer, name: str) -> MadeSamples:
        """Return the samples of pieces that the caller makes. ``name`` is that of the data, for the log."""
        held = () if pieces.heldout is None else (Content(name, None, None, len(pieces.heldout)),)
        return self._made(pieces, tokenizer, (Content(name, None, None, len(pieces.train)),), held)

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
    ) -> MadeSamples:
        samples = self.samples(pieces, tokenizer)

        def in_phases(phases: Phases) -> Samples:
            return self.samples(replace(pieces, train=PhasedPieces(pieces.train, phases)), tokenizer).train

        return MadeSamples(samples.train, samples.heldout, in_phases, contents, heldout_contents)


@dataclass(frozen=True)
class Packing:
    """Options for the samples of a decoder.

    Attributes:
        packed: True joins documents into full samples; False makes each sample of one document or a piece of it, and
            pads it.
        reset_positions: See ``samples.Boundaries``, also for the next two.
        reset_attention: Keep attention inside documents.
        mask_loss: No loss across the end of a document.
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
class DecoderSampleMaker(SampleMaker[TokenPieces]):
    """Makes samples for a causal model. ``packing`` says how documents become samples."""

    packing: Packing = Packing()

    @property
    def collate(self) -> Collate:
        """See SampleMaker."""
        return collate_decoder

    def of_store(self, store: TokenStore, *, held_out: bool) -> TokenPieces:
        """See SampleMaker. Held-out pieces may be shorter than a sample."""
        if not self.packing.packed:
            return DocumentWindows(store, self.seq_length)
        return Windows(store, self.seq_length, shortest=2 if held_out else None)

    def of_rows(self, rows: Any, first: int, last: int, tokenizer: Tokenizer, name: str, field: str) -> TokenPieces:
        """See SampleMaker."""
        return RowWindows(rows, first, last, tokenizer, name, field, self.seq_length)

    def random(self, tokenizer: Tokenizer, seed: int, stream: str) -> TokenPieces:
        """See SampleMaker. The pieces contain end tokens if the samples depend on document ends."""
        ids, longest = tokenizer.ordinary_ids, self.seq_length + 1
        if not self.packing.packed:
            return RandomPieces(ids, min(longest, 2 + self.seq_length // 2), longest, seed, stream)
        boundaries = self.packing.boundaries(tokenizer)
        return RandomPieces(ids, longest, longest, seed, stream, end=boundaries.end if boundaries else None)

    def samples(self, pieces: TrainHeldout[TokenPieces], tokenizer: Tokenizer) -> TrainHeldout[Samples]:
        """See SampleMaker."""

        def make(side: TokenPieces, seed: int | None) -> Samples:
            return DecoderSamples(side, self.seq_length, seed, self.packing.boundaries(tokenizer))

        return TrainHeldout(
            make(pieces.train, self.seed), None if pieces.heldout is None else make(pieces.heldout, None)
        )


@dataclass(frozen=True)
class ErnieSampleMaker(SampleMaker[DocumentPieces]):
    """Makes samples for ERNIE.

    Attributes:
        mlm_probability: Share of the words that are masked.
        tasks: The objectives of ERNIE 3.0, in place of masked words and sentence order.
    """

    mlm_probability: float = 0.15
    tasks: TaskData | None = None

    @property
    def collate(self) -> Collate:
        """See SampleMaker."""
        return collate_ernie if self.tasks is None else partial(collate_tasks, names=self.tasks.names)

    def of_store(self, store: TokenStore, *, held_out: bool) -> DocumentPieces:
        """See SampleMaker."""
        return Spans(store, self._longest)

    def of_rows(self, rows: Any, first: int, last: int, tokenizer: Tokenizer, name: str, field: str) -> DocumentPieces:
        """See SampleMaker."""
        return RowSpans(rows, first, last, tokenizer, name, field, self._longest)

    def random(self, tokenizer: Tokenizer, seed: int, stream: str) -> DocumentPieces:
        """See SampleMaker."""
        return RandomPieces(tokenizer.ordinary_ids, max(2, self._longest // 2), self._longest, seed, stream)

    def samples(self, pieces: TrainHeldout[DocumentPieces], tokenizer: Tokenizer) -> TrainHeldout[Samples]:
        """See SampleMaker."""
        if self.tasks is not None:
            return self.tasks.samples(pieces, tokenizer, self.seq_length, self.seed, self.split)

        def make(side: DocumentPieces, seed: int | None) -> Samples:
            return ErnieSamples(side, self.seq_length, tokenizer, self.mlm_probability, seed)

        return TrainHeldout(
            make(pieces.train, self.seed), None if pieces.heldout is None else make(pieces.heldout, None)
        )

    @property
    def _longest(self) -> int:
        """Most ids of a piece: a sample without the marks of its pair."""
        return self.seq_length - PAIR_MARKS


Maker = DecoderSampleMaker | ErnieSampleMaker
