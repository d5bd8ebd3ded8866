"""Samples as pure functions of (seed, number), mixtures of corpora, and streams."""
