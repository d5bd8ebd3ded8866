"""Units of bytes."""

MEGABYTE = 2**20
GIBIBYTE = 2**30
