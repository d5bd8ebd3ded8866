"""Context parallelism: the ranks of cp share the positions of a sequence (docs/context.md)."""
