"""Folders there and back: what differs between one that ``save_pretrained`` wrote and one that megapar wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megapar.arguments import parse
from megapar.checkpoints.export.from_hf import hf_to_megapar
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.trainer import train

FREE = ("transformers_version", "_name_or_path")  # keys of config.json that may differ


def there_and_back(source: Path, root: Path) -> Path:
    """Convert a folder to a checkpoint and the checkpoint to a folder."""
    hf_to_megapar(source, root / "checkpoint")
    megapar_to_hf(root / "checkpoint", root / "back")
    return root / "back"


def exported(kind: str, source: Path, root: Path, dtype: str) -> Path:
    """The export of a run that starts from a folder and makes no step."""
    flags = ["--load-hf", str(source), "--save-hf", str(root / "export"), "--dtype", dtype, "--device", "cpu"]
    batch = ["--data-path", "mock", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "1"]
    train(parse(kind, [*flags, *batch, "--train-iters", "0", "--eval-interval", "0"], {}), f"file://{root / 'meet'}")
    return root / "export"


def config_differences(source: Path, made: Path) -> list[str]:
    """Keys of config.json with other values."""
    a, b = (json.loads((folder / "config.json").read_text()) for folder in (source, made))
    return _unlike(a, b)


def _unlike(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    keys = sorted((a.keys() | b.keys()) - set(FREE))
    nothing = object()
    return [f"{key}: {a.get(key)} and {b.get(key)}" for key in keys if a.get(key, nothing) != b.get(key, nothing)]


def tensor_differences(source: Path, made: Path) -> list[str]:
    """Tensors of other names, shapes, dtypes or bits."""
    a, b = _tensors(source), _tensors(made)
    found = [f"{name} is in one folder only" for name in sorted(a.keys() ^ b.keys())]
    for name in sorted(a.keys() & b.keys()):
        x, y = a[name], b[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            found.append(f"{name}: {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}")
        elif not torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)):
            found.append(f"{name}: other bits")
    return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def unloaded(architecture: str, folder: Path) -> list[str]:
    """Keys that ``from_pretrained`` misses, does not expect, or finds misshapen."""
    _, info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return [f"{kind}: {key}" for kind in kinds for key in info[kind]]
