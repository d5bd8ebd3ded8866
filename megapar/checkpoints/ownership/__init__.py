"""Ownership of a folder of checkpoints, and the identity of the run that saved them."""
