"""Indexed token files: encoding, the cache, and the split in training and held-out documents."""
