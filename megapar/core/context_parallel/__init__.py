"""Context parallelism: the ranks of the cp axis share the positions of each sequence (docs/context.md)."""
