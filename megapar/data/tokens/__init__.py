"""Indexed token files: encoding, the cache, and the split into training and held-out documents."""
