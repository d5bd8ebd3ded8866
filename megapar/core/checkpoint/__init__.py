"""Checkpoints: any layout writes them, any layout reads them, and nothing of them is pickled."""
