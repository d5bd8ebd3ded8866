"""Output of a benchmark: a Markdown table, and one final line of JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose columns are as wide as necessary. Numbers are passed as text."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    print()


def machine(device: str) -> str:
    """Describe the machine without its name."""
    import torch

    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"


def print_json(result: dict[str, object]) -> None:
    """Print the last line."""
    print(json.dumps(result))
