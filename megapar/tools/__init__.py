"""The `megapar` command."""
