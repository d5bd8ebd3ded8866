"""Names of the files of a published model's folder, as transformers reads and writes them.

config.json                                          settings of the model
model.safetensors                                    all weights, or
model-00001-of-00002.safetensors, ..                 parts of them, and
model.safetensors.index.json                         the part that each weight is in
"""

from __future__ import annotations

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weights_name(number: int, count: int) -> str:
    """Return the name of a file of weights. number: from 1 to ``count``, the number of files."""
    return WEIGHTS_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
