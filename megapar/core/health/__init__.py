"""Guards and watchdogs that detect hangs, divergence, non-finite or corrupted numbers, and lost processes."""
