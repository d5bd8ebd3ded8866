"""A corpus, ready to train on: samples of both sides, the tokenizer, and what a model that knows nothing would lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from megapar.data.batches import Collate, collate_decoder, collate_ernie
from megapar.data.cache import digest, made_once
from megapar.data.ernie import FRAME, SHORTEST_SEQUENCE, ErnieSamples, Spans
from megapar.data.mock import MockTokenizer, RandomPieces
from megapar.data.samples import DecoderSamples, Pieces, Samples, Windows
from megapar.data.source import MOCK, Source, all_documents, open_sources, sources_hash
from megapar.data.store import Split, Stores, open_stores
from megapar.data.tokenizer import Tokenizer, load_tokenizer
from megapar.errors import Complaint, ConfigError, DataError

ERNIE = "ernie"
KINDS = ("moe", ERNIE)
DEFAULT_SPLIT = "95,5"


class Unigram(NamedTuple):
    """Nats per token of the training tokens' own frequencies: what a model loses that knows only those.

    train: their entropy. heldout: the cross-entropy of the held-out tokens under them (counts plus one).
    """

    train: float
    heldout: float


@dataclass(frozen=True)
class Corpus:
    """What a trainer reads.

    train, heldout: samples by number; held-out ones in a fixed order that no seed changes.
    collate: makes a micro-batch of such samples. vocab_size: rows of the embedding, at least tokenizer.size.
    """

    train: Samples
    heldout: Samples
    tokenizer: Tokenizer
    vocab_size: int
    collate: Collate
    _stores: Stores | None

    def unigram_entropy(self) -> Unigram:
        """Counted over all tokens of both sides, end tokens included; of random tokens it is known."""
        import numpy as np

        if self._stores is None:
            known = float(np.log(len(self.tokenizer.ordinary_ids)))
            return Unigram(known, known)
        train, heldout = (store.counts(self.tokenizer.size) for store in self._stores)
        share = train[train > 0] / train.sum()
        smooth = (train + 1) / (train.sum() + len(train))
        return Unigram(float(-(share * np.log(share)).sum()), float(-(heldout * np.log(smooth)).sum() / heldout.sum()))


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
) -> Corpus:
    """Open, check, tokenise and cut a corpus; the slow parts are made once and kept in the cache folder.

    kind: ``moe`` (a decoder) or ``ernie``. data_path: builtin, mock, or files and folders, one after the other.
    eval_data_path: held-out text; without it documents are held out by ``split`` (default DEFAULT_SPLIT).
    tokenizer_model: a sentencepiece model, a tokenizer.json or a Hugging Face folder; without it one of
    vocab_size ids is trained on the training documents. seq_length: S. seed: of order and masks.
    Any number of processes may call this at once. Raises DataError for what is wrong with the data and
    ConfigError where the tokenizer has more ids than ``vocab_size``.
    """
    if kind not in KINDS:
        raise ValueError(f"the kind is {kind!r}, not one of {KINDS}")
    if kind == ERNIE and seq_length < SHORTEST_SEQUENCE:
        raise DataError(f"sentence pairs need a --seq-length of at least {SHORTEST_SEQUENCE}, not {seq_length}")
    text = None if _is_mock(data_path, eval_data_path) else _Text.open(data_path, eval_data_path, split)
    if tokenizer_model:
        tokenizer = load_tokenizer(tokenizer_model)
    else:
        tokenizer = MockTokenizer(vocab_size) if text is None else text.trained_tokenizer(vocab_size)
    _check_size(tokenizer, tokenizer_model, vocab_size)
    stores = None if text is None else open_stores(text.train, text.heldout, text.split, tokenizer)
    if kind == ERNIE:
        train, heldout = _ernie_samples(stores, tokenizer, seq_length, seed, mlm_probability)
    else:
        train, heldout = _decoder_samples(stores, tokenizer, seq_length, seed)
    collate = collate_ernie if kind == ERNIE else collate_decoder
    return Corpus(train, heldout, tokenizer, vocab_size, collate, stores)


def _is_mock(data_path: Sequence[str], eval_data_path: Sequence[str] | None) -> bool:
    if list(data_path) != [MOCK]:
        return False
    if eval_data_path and list(eval_data_path) != [MOCK]:
        raise DataError("--data-path mock holds out random tokens of its own; leave --eval-data-path out")
    return True


class _Text(NamedTuple):
    """The documents of a corpus. heldout: sources of their own, or None where ``split`` decides."""

    train: tuple[Source, ...]
    heldout: tuple[Source, ...] | None
    split: Split

    @classmethod
    def open(cls, data_path: Sequence[str], eval_data_path: Sequence[str] | None, split: str | None) -> _Text:
        heldout = open_sources(eval_data_path) if eval_data_path else None
        return cls(open_sources(data_path), heldout, Split.parse(split or DEFAULT_SPLIT))

    def training_documents(self) -> Iterator[str]:
        documents = all_documents(self.train)
        return documents if self.heldout else (text for text in documents if self.split.side(text) == 0)

    def trained_tokenizer(self, vocab_size: int) -> Tokenizer:
        """The tokenizer of ``vocab_size`` ids trained on the training documents, once."""
        import sentencepiece

        from megapar.data.sentencepiece_tokenizer import TRAINING_VERSION, SentencePieceTokenizer, train

        key = digest(
            *(str(TRAINING_VERSION), sentencepiece.__version__, sources_hash(self.train), str(vocab_size)),
            "apart" if self.heldout else repr(self.split.train),
        )

        def make(path: Path) -> None:
            documents = self.training_documents()
            first = next(documents, None)
            if first is None:
                names = ", ".join(source.name for source in self.train)
                raise DataError(f"{names}: the corpus holds no documents to train on")
            path.write_bytes(train(chain([first], documents), vocab_size))

        path = made_once(f"tokenizers/{key}.model", make)
        return SentencePieceTokenizer(path.read_bytes(), name=str(path))


def _check_size(tokenizer: Tokenizer, name: str | None, vocab_size: int) -> None:
    if tokenizer.size > vocab_size:
        raise ConfigError(
            [
                Complaint(
                    "vocabulary",
                    f"the tokenizer {name or 'trained here'} has {tokenizer.size} ids, more than the "
                    f"{vocab_size} rows of the embedding (--vocab-size {vocab_size}).",
                    f"Give --vocab-size {tokenizer.size} or more.",
                )
            ]
        )


def _decoder_samples(
    stores: Stores | None, tokenizer: Tokenizer, seq_length: int, seed: int
) -> tuple[Samples, Samples]:
    train: Pieces
    heldout: Pieces
    if stores is None:
        length, ids = seq_length + 1, tokenizer.ordinary_ids
        train = RandomPieces(ids, length, length, seed, "train")
        heldout = RandomPieces(ids, length, length, 0, "heldout")
    else:
        train, heldout = Windows(stores.train, seq_length), Windows(stores.heldout, seq_length, shortest=2)
    return DecoderSamples(train, seq_length, seed), DecoderSamples(heldout, seq_length, None)


def _ernie_samples(
    stores: Stores | None, tokenizer: Tokenizer, seq_length: int, seed: int, mlm_probability: float
) -> tuple[Samples, Samples]:
    longest = seq_length - FRAME
    train: Pieces
    heldout: Pieces
    if stores is None:
        shortest, ids = max(2, longest // 2), tokenizer.ordinary_ids
        train = RandomPieces(ids, shortest, longest, seed, "train")
        heldout = RandomPieces(ids, shortest, longest, 0, "heldout")
    else:
        train, heldout = Spans(stores.train, longest), Spans(stores.heldout, longest)
    return (
        ErnieSamples(train, seq_length, tokenizer, mlm_probability, seed),
        ErnieSamples(heldout, seq_length, tokenizer, mlm_probability, None),
    )
