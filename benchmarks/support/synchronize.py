"""The wait before a clock is read."""

from __future__ import annotations

import torch


def synchronize(device: torch.device | str) -> None:
    """Wait until a GPU has done all that is enqueued; a CPU has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
