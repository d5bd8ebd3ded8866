"""The loss of a model that knows only how frequent tokens are, which a trained model must beat."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapar.data import Corpus
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.data.tokens.store import StoreBlend, TokenStore


class Unigram(NamedTuple):
    """Nats per token under the frequencies of the training tokens.

    Attributes:
        train: Their entropy.
        heldout: Cross-entropy of the held-out tokens under them (counts plus one); NaN if nothing is held out.
    """

    train: float
    heldout: float


def unigram_entropy(corpus: Corpus) -> Unigram:
    """Return the entropy over all tokens, including end tokens; for random tokens, the known one.

    Streamed tokens cannot be counted.
    """
    if corpus.stores is None:
        assert isinstance(corpus.tokenizer, MockTokenizer)
        known = float(np.log(len(corpus.tokenizer.ordinary_ids)))
        return Unigram(known, known)
    counts = corpus.stores.map(lambda blend: blend_counts(blend, corpus.vocab_size))
    train, heldout = counts.train, counts.heldout
    share = train[train > 0] / train.sum()
    entropy = float(-(share * np.log(share)).sum())
    if heldout is None:
        return Unigram(entropy, float("nan"))
    smooth = (train + 1) / (train.sum() + len(train))
    return Unigram(entropy, float(-(heldout * np.log(smooth)).sum() / heldout.sum()))


def blend_counts(blend: StoreBlend, size: int) -> np.ndarray:
    """Return the counts of each id [size], in which each store has its weight."""
    counts = [store_counts(store, size) for store in blend.stores]
    if blend.weights is None:
        return np.asarray(sum(counts))
    total, weight = sum(c.sum() for c in counts), float(sum(blend.weights))
    shares = (total * float(w) / weight / c.sum() for c, w in zip(counts, blend.weights, strict=True))
    return np.asarray(sum(c * share for c, share in zip(counts, shares, strict=True)))


def store_counts(store: TokenStore, size: int) -> np.ndarray:
    """Return the counts of each id, int64 [size]."""
    total = np.zeros(size, dtype=np.int64)
    for start in range(0, len(store.tokens), 1 << 22):
        total += np.bincount(store.tokens[start : start + (1 << 22)], minlength=size)
    return total
