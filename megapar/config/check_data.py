"""Checks of a configuration's data files by their names, headers and first lines."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from megapar.config.config import FLAGS
from megapar.config.run import SFT
from megapar.config.vocab_size import known_vocabulary
from megapar.errors import Complaint, DataError, listed
from megapar.files.conversation import FORMS, conversation_of
from megapar.files.data_files import (
    FIELD,
    INDEXED,
    JSONL,
    PARQUET,
    TEXT,
    ZSTANDARD,
    bare_name,
    blend_of,
    decoded,
    first_line,
    inspect,
    kind_of,
    listing,
    nothing_read,
    refusal_of,
    text_of_line,
)
from megapar.files.paths import is_url, near_path
from megapar.files.regular_file import read_json
from megapar.files.task_file import named_tasks, read_tasks
from megapar.files.token_index import check_corpus

NAMED_DATA = ("builtin", "mock")
MAX_LINE_BYTES = 1 << 20  # a longer first line is left to the reader
MAX_FILES = 100  # files of a folder whose first lines are checked
SHOWN_FILES = 3
_PARQUET_MAGIC = b"PAR1"
_SUCH_FILES = "Pass a folder with such files, or text of other suffixes by the names of its files."
_HUB_NAME = r"[\w.-]+(/[\w.-]+)?"


def check_data(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield complaints about --data-path, --eval-data-path and --hf-dataset; missing values are skipped."""
    if values.get("data_source") == "hf":
        if values.get("hf_dataset"):
            yield from _dataset(str(values["hf_dataset"]), _field(values))
        return
    paths = {name: _items(values.get(name)) for name in ("data_path", "eval_data_path")}
    paths = {name: [item for item in items if not is_url(item)] for name, items in paths.items()}
    for name, items in paths.items():
        for item in items:
            if name == "eval_data_path" or item not in paths["eval_data_path"]:  # once, and of the flag that is given
                yield from _item(name, item, values)
    indexed = [prefix for items in paths.values() for item in items if (prefix := _prefix(item)) is not None]
    texts = [item for items in paths.values() for item in items if item != "mock" and _prefix(item) is None]
    if indexed and texts and values.get("tokenizer_model") is None:
        yield Complaint(
            "tokenizer",
            f"{indexed[0]} contains tokens of an existing tokenizer, and the text next to it ({texts[0]}) must be "
            "tokenized with the same one.",
            "Set --tokenizer-model to that tokenizer.",
        )


def check_knowledge(name: str, path: Path) -> Iterator[Complaint]:
    """Yield complaints about the first lines of a lexicon or of triples. ``name``: field name of the flag."""
    spelling = FLAGS[name].spelling
    with path.open("rb") as file:
        head = file.read(MAX_LINE_BYTES)
    lines = head.splitlines() if len(head) < MAX_LINE_BYTES else head.splitlines()[:-1]
    for number, line in enumerate(lines, 1):
        try:
            text = decoded(line, f"{spelling} {path}, line {number}", "")
        except DataError as error:
            yield Complaint("record", f"{error}.")
            return
        cells = [cell.strip() for cell in text.split("\t")]
        if name == "triples_file" and text.strip() and (len(cells) != 4 or not all(cells)):
            message = f"{spelling} {path}, line {number}: {len(cells)} cells instead of HEAD, RELATION, TAIL, SENTENCE."
            yield Complaint("record", message, "Separate the four with tabs.")
            return
    if not any(line.strip() for line in lines):
        yield Complaint("file", f"{spelling} {path} contains no entries.", "Write one entry per line.")


def check_tasks(words: Sequence[str]) -> Iterator[Complaint]:
    """Yield a complaint about each file of --eval-tasks: its first bad record."""
    for _, path in named_tasks(words):
        if not Path(path).is_file():
            yield missing("eval_tasks", path)
            continue
        try:
            read_tasks(path)
        except DataError as error:
            yield Complaint("record", f"--eval-tasks {error}.", "Repair or remove the line (docs/data.md).")


def missing(name: str, path: str) -> Complaint:
    """Return a complaint about a missing file or folder, with similar names. ``name``: field name of the flag."""
    if name.endswith("data_path") and _is_mixture(path):
        fix = f"In a YAML file, write a list: [{', '.join(path.split())}]; on the command line, remove the quotes."
        return Complaint("file-missing", f"{FLAGS[name].spelling} {path} does not exist.", fix)
    if name.endswith("data_path") and re.search(r"[*?,]", path):
        fix = "Patterns and commas are not expanded: write the paths apart, or their folder, without quotes."
        return Complaint("file-missing", f"{FLAGS[name].spelling} {path} does not exist.", fix)
    fix = near_path(path, NAMED_DATA if name.endswith("data_path") else ())
    is_file = path.endswith((".model", ".json", ".txt"))
    if name in ("load_hf", "tokenizer_model") and re.fullmatch(_HUB_NAME, path) and not is_file:
        fix += (
            " megapar downloads nothing: download a model from the Hub first, "
            f"`hf download {path} --local-dir {path.split('/')[-1]}`, and pass that folder."
        )
    return Complaint("file-missing", f"{FLAGS[name].spelling} {path} does not exist.", fix)


def _field(values: Mapping[str, Any]) -> str:
    return str(values.get("text_field") or FIELD)


def _items(paths: Any) -> list[str]:
    try:
        return [item.path for item in blend_of(paths or ())]
    except ValueError:  # refused by a row of the matrix
        return []


def _is_mixture(text: str) -> bool:
    """Return True if a single string contains weights and paths in turn."""
    try:
        parts = blend_of(text.split())
    except ValueError:
        return False
    return bool(parts) and parts[0].weight is not None


def _prefix(path: str) -> str | None:
    """Return the prefix of indexed files that a path names, or None if it names something else."""
    prefix = path[:-4] if path.endswith(INDEXED) else path
    exists = any(Path(f"{prefix}{suffix}").exists() for suffix in INDEXED)
    return prefix if exists and (prefix != path or not Path(path).exists()) else None


def _item(name: str, item: str, values: Mapping[str, Any]) -> Iterator[Complaint]:
    path, spelling = Path(item), FLAGS[name].spelling
    if item in NAMED_DATA:
        return
    if item.endswith(INDEXED) or not path.exists():
        yield from _indexed(name, item, values)
    elif path.is_dir():
        yield from _folder(name, path, values)
    elif not path.stat().st_size:
        yield Complaint("file", f"{spelling} {item} is empty.", "Pass a file that contains text.")
    elif reason := refusal_of(path):
        yield Complaint("file", f"{spelling} {item} cannot be read as text.", f"It is {reason}.")
    else:
        yield from _content(name, path, values)


def _folder(name: str, folder: Path, values: Mapping[str, Any]) -> Iterator[Complaint]:
    spelling, entries = FLAGS[name].spelling, listing(folder)
    corpora = sorted({str(path)[:-4] for path in folder.iterdir() if path.suffix in INDEXED})
    if corpora and not entries.taken:
        more = f" (and {len(corpora) - 1} more)" if len(corpora) > 1 else ""
        message = f"{spelling} {folder} is a folder of indexed files, which are named by their prefixes."
        yield Complaint("file", message, f"Write {spelling} {corpora[0]}{more}; with weights: 0.7 A 0.3 B.")
    elif not entries.taken:
        yield Complaint("file", f"{spelling} {folder}: {nothing_read(entries)}.", _SUCH_FILES)
    alike: dict[tuple[str, str, str], list[tuple[str, Complaint]]] = {}  # complaints that only differ in the file
    for file in islice(entries.taken, MAX_FILES):
        assert isinstance(file, Path), "this is a folder of a disk"
        for one in _content(name, file, values):
            alike.setdefault((one.rule, one.message.replace(str(file), ""), one.fix), []).append((file.name, one))
    for (_, first), *others in alike.values():
        more = f" The same of {len(others)} more: {listed([file for file, _ in others], SHOWN_FILES)}."
        yield replace(first, fix=first.fix + more) if others else first


def _content(name: str, path: Path, values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield complaints about a file's first bytes or lines or, for parquet, its last bytes."""
    spelling, field = FLAGS[name].spelling, _field(values)
    chats = values.get("task") == SFT
    packed = path.suffix.lower() == ZSTANDARD and sys.version_info < (3, 14)
    if not os.access(path, os.R_OK):
        yield Complaint("file", f"{spelling} {path} is not readable.", "Change its permissions.")
    elif packed and importlib.util.find_spec("pyarrow") is None:
        message = f"{spelling} {path}: Zstandard files need the package pyarrow here."
        yield Complaint("package", message, f"Install it (pip install pyarrow), or unpack the file: zstd -d {path}.")
    elif not packed:  # pyarrow takes longer to import than all other checks
        try:
            defect, records, _ = inspect(path, field)
        except DataError as error:
            yield Complaint("record", f"{spelling} {error}.")
            return
        if defect:
            yield Complaint("file", f"{spelling} {path} {defect}.")
        elif chats and kind_of(path) not in (*JSONL, PARQUET):
            message = f"{spelling} {path}: conversations are read from {', '.join((*JSONL, PARQUET))} files."
            yield Complaint("file", message, "Text is trained on without --task sft.")
        elif kind_of(path) == PARQUET:
            yield from _parquet(spelling, path, FORMS if chats else (field,))
        elif values.get("on_bad_record") == "stop" and (records or kind_of(path) in TEXT):
            yield from _first_record(spelling, path, field, records, chats=chats)


def _first_record(spelling: str, path: Path, field: str, records: bool, *, chats: bool) -> Iterator[Complaint]:
    """Check the first line, which shows the mistakes that concern the whole file: a wrong field or encoding."""
    try:
        number, line = first_line(path, MAX_LINE_BYTES)
        if number == 0:
            yield Complaint("file", f"{spelling} {path} contains no text.", "Pass a file that contains text.")
        elif len(line) < MAX_LINE_BYTES:
            place = f"{spelling} {path}, line {number}"
            if chats:
                _check_conversation(line, place)
            elif records:
                text_of_line(line, place, field)
            else:
                decoded(line, place)
    except DataError as error:
        yield Complaint("record", f"{error}.")


def _check_conversation(line: bytes, place: str) -> None:
    try:
        conversation_of(line)
    except DataError as error:
        raise DataError(f"{place}{error}") from error


def _parquet(spelling: str, path: Path, fields: Sequence[str]) -> Iterator[Complaint]:
    """Check that the footer contains a column's name, which is plain text there; the rest is left to pyarrow."""
    with path.open("rb") as file:
        first = file.read(4)
        file.seek(max(0, path.stat().st_size - 8))
        last = file.read(8)
        length = int.from_bytes(last[:4], "little")
        file.seek(max(0, path.stat().st_size - 8 - length))
        footer = file.read(length)
    if first != _PARQUET_MAGIC or last[4:] != _PARQUET_MAGIC or len(footer) != length:
        message = f"{spelling} {path} is not a parquet file, or is cut off."
        yield Complaint("file", message, "Download or write it again.")
    elif importlib.util.find_spec("pyarrow") is None:
        message = f"{spelling} {path}: parquet files need the package pyarrow."
        yield Complaint("package", message, "Install it: pip install pyarrow.")
    elif not any(field.encode() in footer for field in fields):
        message = f"{spelling} {path} has no column {' or '.join(map(repr, fields))}."
        fix = "" if fields == FORMS else "Name the column that contains the text: --text-field NAME."
        yield Complaint("record", message, fix)


def _indexed(name: str, item: str, values: Mapping[str, Any]) -> Iterator[Complaint]:
    spelling = FLAGS[name].spelling
    prefix = item[:-4] if item.endswith(INDEXED) else item
    pair = [f"{prefix}{suffix}" for suffix in INDEXED]
    lacking = [file for file in pair if not Path(file).exists()]
    if len(lacking) == 2:
        near = sorted(path.stem for path in Path(prefix).parent.glob(f"{Path(prefix).name}_*.idx"))
        complaint = missing(name, item)
        fix = f"Did you mean {' or '.join(str(Path(prefix).with_name(stem)) for stem in near[:3])}?"
        yield Complaint(complaint.rule, complaint.message, fix) if near else complaint
        return
    if lacking:
        present = next(file for file in pair if file not in lacking)
        message = f"{spelling} {item}: {present} exists, but {lacking[0]} does not."
        yield Complaint("file-missing", message, "Copy both files, or prepare the corpus again.")
        return
    known = known_vocabulary(values)
    try:
        check_corpus(prefix, known.size if known is not None else values.get("vocab_size"))
    except (DataError, OSError) as error:
        yield Complaint("file", f"{spelling} {error}.")


def _dataset(name: str, field: str) -> Iterator[Complaint]:
    """Yield complaints about a name that neither exists nor is in the cache of ``datasets``, or lacks the column."""
    if importlib.util.find_spec("datasets") is None:
        yield Complaint(
            "package", f"--hf-dataset {name} needs the package datasets.", "Install it: pip install datasets."
        )
    elif not Path(name).exists():
        if not _is_cached(name):
            hub = re.fullmatch(_HUB_NAME, name) is not None
            local = name.split("/")[-1]
            fix = (
                f"A run downloads nothing: run `hf download {name} --repo-type dataset --local-dir {local}`, then pass "
                f"--hf-dataset {local}."
            )
            message = f"--hf-dataset {name} is not a file or folder here, and is not in the cache of datasets."
            yield Complaint("file-missing", message, fix if hub else near_path(name))
    else:
        for info in (Path(name) / "dataset_info.json", Path(name) / "train" / "dataset_info.json"):
            columns = _columns(info)
            if columns and field not in columns:
                message = f"--hf-dataset {name} has no column {field!r}; it has {', '.join(map(repr, columns))}."
                yield Complaint("record", message, "Name the column that contains the text: --text-field NAME.")
                return


def _columns(info: Path) -> list[str]:
    try:
        return list(read_json(info)["features"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _is_cached(name: str) -> bool:
    """Return True if the cache of ``datasets`` or of the Hub's library contains this name."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    cached = [entry.name for folder in (kept, hub) if folder.is_dir() for entry in folder.iterdir()]
    wanted = (bare_name(name), bare_name(f"datasets{name}"))
    return any(bare_name(name) in wanted for name in cached)
