"""A Hugging Face folder of a checkpoint for one use: in a temporary folder, or kept in a cache by its content."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megapar.config.from_hf import BESIDE, TOKENIZER_FILES
from megapar.core.checkpoint import folder as folders
from megapar.core.units import GIBIBYTE
from megapar.data.tokenizers.stored_tokenizer import load_stored_tokenizer
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.errors import CheckpointError
from megapar.files.checkpoint_names import LAYOUT_FILE
from megapar.files.location import Location, Place, at
from megapar.files.regular_file import INDEX_BYTES
from megapar.model.spec import spec_of, table_of
from megapar.training.checkpoints.convert import CARRIED, megapar_to_hf
from megapar.training.checkpoints.saved import Saved

BESIDE_WEIGHTS = 64 << 20
"""Bytes for what a folder contains besides weights: tokenizer, configuration, headers."""
_DIGITS = 12


@contextmanager
def exported(
    source: Place, cache: Path | None, *, dtype: torch.dtype | None = None, tokenizer: Tokenizer | None = None
) -> Iterator[Path]:
    """Provide a Hugging Face folder of a checkpoint of a decoder.

    Raises CheckpointError if it cannot be written, before anything is written if the disk is too small.

    Args:
        source: A folder of checkpoints, whose latest one is taken, or a single checkpoint.
        cache: Folder that keeps the result. None writes a temporary folder, which is removed at the end.
        dtype: See ``megapar_to_hf``.
        tokenizer: See ``megapar_to_hf``.
    """
    checkpoint = at(source) if (at(source) / LAYOUT_FILE).is_file() else folders.find(source)
    saved = Saved(checkpoint)
    if spec_of(saved.sizes).kind != "moe":
        raise CheckpointError(
            f"{checkpoint} is {spec_of(saved.sizes).title}: it fills in words that are masked, and continues no text. "
            "Export it with megapar convert megapar-to-hf, and use it in transformers"
        )
    if cache is None:
        with tempfile.TemporaryDirectory(prefix="megapar-generate-") as place:
            yield _write(checkpoint, saved, Path(place) / "model", dtype, tokenizer)
        return
    kept = cache / _name(checkpoint, dtype, tokenizer)
    yield kept if kept.is_dir() else _write(checkpoint, saved, kept, dtype, tokenizer)


def _name(checkpoint: Location, dtype: torch.dtype | None, tokenizer: Tokenizer | None) -> str:
    """Return the folder's name, which differs for other weights (``layout.json`` has their hashes), dtype and ids."""
    state = hashlib.sha256((checkpoint / LAYOUT_FILE).content(INDEX_BYTES))
    state.update(f"{dtype}\0{'' if tokenizer is None else tokenizer.fingerprint()}".encode())
    root = Path(os.path.abspath(str(checkpoint.parent)))
    return f"{root.name}-{checkpoint.name}-{state.hexdigest()[:_DIGITS]}"


def _write(
    checkpoint: Location, saved: Saved, out: Path, dtype: torch.dtype | None, tokenizer: Tokenizer | None
) -> Path:
    if tokenizer is None and not _has_tokenizer(checkpoint.parent):
        raise CheckpointError(f"{checkpoint} has no stored tokenizer. Pass that of the run with --tokenizer-model PATH")
    check_space(out, exported_bytes(saved, dtype) + ((checkpoint.parent / BESIDE).list().get(CARRIED) or 0))
    megapar_to_hf(checkpoint, out, dtype=dtype, tokenizer=tokenizer)
    return out


def _has_tokenizer(root: Location) -> bool:
    """Return True if a folder of checkpoints has a tokenizer, of its run or of the published model."""
    published = not {*TOKENIZER_FILES}.isdisjoint((root / BESIDE).list())
    return published or load_stored_tokenizer(root) is not None


def exported_bytes(saved: Saved, dtype: torch.dtype | None) -> int:
    """Return the size of the folder of a checkpoint, an upper bound; without ``dtype`` in fp32."""
    width = (dtype or torch.float32).itemsize
    return BESIDE_WEIGHTS + width * sum(row.numel for row in table_of(saved.sizes))


def check_space(path: Path, needed: int) -> None:
    """Raise CheckpointError if the disk of a path, which need not exist, has fewer than ``needed`` bytes free."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"the export needs {needed / GIBIBYTE:.2f} GiB in {place}, where {free / GIBIBYTE:.2f} GiB are free. "
            "Choose another disk with --hf-cache DIR or TMPDIR, or --dtype bf16"
        )
