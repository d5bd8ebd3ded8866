"""Documents in, micro-batches out: tokenizers, samples as pure functions of (seed, number), masking."""

from megapar.data.corpus import Corpus, Unigram, build

__all__ = ["Corpus", "Unigram", "build"]
