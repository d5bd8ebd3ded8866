"""The bytes of text that ids are for, which make losses of different tokenizers comparable: bits per byte."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.data.lazy_numpy import np
from megapar.data.sampling.samples import NO_LOSS, WEIGHTS, Sample
from megapar.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenBytes:
    """The UTF-8 bytes of each id, and how a text begins.

    Attributes:
        sizes: [vocabulary] int64, bytes of the text that an id is for; 0 for special tokens, such as a document's end.
        prefix: Bytes that the tokenizer puts before a text, such as the space of many sentencepiece models.
        end: The end token of documents; None without one.
    """

    sizes: np.ndarray
    prefix: int
    end: int | None

    def of_sample(self, sample: Sample) -> float:
        """Return the bytes of the predicted text of a decoder's sample, each label's times its weight in the loss."""
        labels = sample["labels"]
        predicted = labels != NO_LOSS
        sizes = self.sizes[np.where(predicted, labels, 0)] * predicted
        if self.prefix and self.end is not None:
            sizes = sizes - self.prefix * ((sizes > 0) & (sample["tokens"] == self.end))
        return float((sizes * sample.get(WEIGHTS, np.float32(1)).astype(np.float64)).sum())


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes | None:
    """Return the bytes of the ids below ``vocab_size``; None if the tokenizer has no text, or its pieces lose some."""
    pieces = tokenizer.piece_bytes
    if pieces is None:
        return None
    sizes = np.zeros(max(vocab_size, len(pieces)), dtype=np.int64)
    sizes[: len(pieces)] = pieces
    return TokenBytes(sizes, max(0, int(sizes[tokenizer.encode("a")].sum()) - 1), tokenizer.special.eos)
