"""The data pipeline, from documents to micro-batches: tokenizers, samples as functions of (seed, number), masking."""

from megapar.data.corpus import Corpus, build

__all__ = ["Corpus", "build"]
