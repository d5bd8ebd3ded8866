"""Documents in, micro-batches out: tokenizers, samples as pure functions of (seed, number), masking."""

from megapar.data.corpus import Corpus, build

__all__ = ["Corpus", "build"]
