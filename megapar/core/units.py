"""Units of bytes."""

MEGABYTE = 2**20
GIBIBYTE = 2**30


def billions(count: int) -> str:
    """A number of parameters, for people: billions from a tenth of one on, else millions."""
    return f"{count / 1e9:.4g} B" if count >= 1e8 else f"{count / 1e6:.4g} M"
