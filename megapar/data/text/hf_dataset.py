"""A dataset of the Hugging Face hub or of its cache, opened by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megapar.errors import DataError
from megapar.files.data_files import FIELD, ROW


def open_dataset(name: str, part: str = "train", field: str = FIELD) -> Any:
    """Open the rows of a dataset on this machine.

    ``name`` is a folder of ``save_to_disk``, a folder or file that ``datasets`` can read, or a name whose data is
    already in its cache. Code of a dataset is never run, and nothing is downloaded. Raises DataError if the dataset
    cannot be read, has no such part or field, or has no rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name}: reading it needs the package datasets (pip install datasets)") from error
    try:
        with _offline(datasets):
            rows = _loaded(datasets, name)
        if isinstance(rows, dict):
            if part not in rows:
                raise DataError(f"{name}: the dataset has no part {part!r}; it has {', '.join(map(repr, rows))}")
            rows = rows[part]
    except DataError:
        raise
    except Exception as error:  # datasets raises many types for a source that it cannot read
        raise DataError(f"{name}: datasets cannot read it here ({type(error).__name__}: {error})") from error
    if field not in (ROW, *rows.column_names):
        columns = ", ".join(map(repr, rows.column_names))
        raise DataError(f"{name}: no column {field!r}; the dataset has {columns}")
    if len(rows) == 0:
        raise DataError(f"{name}: the dataset has no rows")
    return rows


def _loaded(datasets: Any, name: str) -> Any:
    path = Path(name)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(name)
    if path.is_file():
        kind = {".jsonl": "json", ".ndjson": "json", ".txt": "text"}.get(path.suffix, path.suffix[1:])
        return datasets.load_dataset(kind, data_files=name)
    return datasets.load_dataset(name, download_config=datasets.DownloadConfig(local_files_only=True))


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Keep the libraries off the network, where they would retry for a long time before reporting a missing name."""
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (constants, datasets.config)
    saved = [(module, module.HF_HUB_OFFLINE) for module in modules]
    try:
        for module, _ in saved:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in saved:
            module.HF_HUB_OFFLINE = value
