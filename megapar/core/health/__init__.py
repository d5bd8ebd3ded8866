"""Guards and watchdogs: they detect hangs, divergence, bad numbers and lost processes."""
