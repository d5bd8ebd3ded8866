"""Documents in, micro-batches out: tokenizers, samples as pure functions of (seed, number), masking."""
