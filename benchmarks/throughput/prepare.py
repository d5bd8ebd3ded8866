"""Start of every contestant of a race: a published model's folder with random weights, and random samples.

python -m benchmarks.throughput.prepare --device cpu --model ernie FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.throughput.shape import SHAPES, Shape, find

STEPS = 4  # different batches, which contestants repeat
IGNORED, PADDING = -100, 0
MASKED = 0.15
FILES = {"full": "samples.pt", "real": "samples-real.pt"}  # by the lengths of the samples
SHORTEST = 0.2  # of real lengths, relative to a full sample; their mean is 0.6


def samples(shape: Shape, count: int, lengths: str = "full") -> list[dict[str, np.ndarray]]:
    """Return samples of random tokens, as megapar's collate takes them; those of "real" lengths are padded."""
    draws = np.random.default_rng(0)
    length, vocabulary = shape.seq_length, shape.config["vocab_size"]
    if shape.kind == "moe":
        tokens = draws.integers(7, vocabulary, (count, length + 1))
        return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    found = []
    shares = np.random.default_rng(1).permutation(np.linspace(SHORTEST, 1.0, count))
    taken = np.rint(shares * length).astype(int) if lengths == "real" else np.full(count, length)
    for row, own in zip(draws.integers(7, vocabulary, (count, length)), taken, strict=True):
        places = draws.permutation(own)[: round(own * MASKED)]
        labels = np.full(length, IGNORED)
        labels[places] = row[places]
        row[places] = 6
        valid = np.arange(length) < own
        types = (valid & (np.arange(length) >= own // 2)).astype(np.int64)
        row[~valid] = PADDING
        found.append({"tokens": row, "token_types": types, "labels": labels, "valid": valid, "label": np.array(0)})
    return found


def write(shape: Shape, device: str, folder: Path) -> None:
    """Write the folder of a shape: weights drawn on a device, and samples."""
    torch.manual_seed(0)
    config = getattr(transformers, shape.config_class)(**shape.config)
    with torch.device(device):
        model = getattr(transformers, shape.architecture)(config)
    if device == "cuda":
        model.to(torch.bfloat16)  # half the bytes; all contestants train from the same values in fp32
    model.save_pretrained(folder)
    for lengths, name in FILES.items():
        torch.save(samples(shape, STEPS * shape.micro_batch, lengths), folder / name)


def main() -> None:
    """Write the folder of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=tuple(SHAPES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write(find(options.device, options.model), options.device, options.folder)


if __name__ == "__main__":
    main()
