"""Do the files that a configuration names exist, and can it write where it wants to?"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megapar.config.config import FLAGS
from megapar.config.data_files import TEXT, ZSTANDARD, kind_of, listing, nothing_read, opened, refusal_of
from megapar.config.foreign import FIX, foreign_checkpoint
from megapar.config.hints import near_path
from megapar.config.record import FIELD, JSONL, decoded, text_of_line
from megapar.errors import Complaint, DataError
from megapar.rules.data import blend_of
from megapar.rules.rule import either

NAMED_DATA = ("builtin", "mock")
MOST_STEPS = 8  # of a message
LONGEST_LOOK = 1 << 20  # bytes; a longer first line is left to the reader
# One of them is in every folder with a tokenizer; sentencepiece's may have any name before ``.model``.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")


def check_files(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Complaints about paths; values that are missing or None are passed over."""
    for name in ("data_path", "eval_data_path"):
        try:
            blend = blend_of(values.get(name) or ())
        except ValueError:  # a rule row speaks of it
            continue
        for _, item in blend:
            yield from _data(name, item)
            if values.get("on_bad_record") == "stop":
                yield from _first_record(name, Path(item), str(values.get("text_field") or FIELD))
    for name in ("tokenizer_model", "load", "load_hf", "phrase_file", "entity_file", "triples_file"):
        path = values.get(name)
        # One folder for --load and --save is how a script is written that is queued again: its first run makes it.
        first_run = name == "load" and _saves_where_it_loads(values)
        if path is not None and not Path(path).exists() and not first_run:
            yield _missing(name, path)
    if values.get("tokenizer_model"):
        yield from _tokenizer(Path(values["tokenizer_model"]))
    if values.get("load") and Path(values["load"]).is_file():
        yield Complaint("file", f"--load {values['load']} is a file.", "It takes a checkpoint folder.")
    elif values.get("load") and (foreign := foreign_checkpoint(Path(values["load"]))):
        yield Complaint("checkpoint-foreign", f"--load {values['load']} is {foreign}.", FIX)
    elif values.get("load") and not _saves_where_it_loads(values):
        yield from _checkpoint(Path(values["load"]))
    if values.get("load_hf"):
        yield from _published(Path(values["load_hf"]))
    if values.get("load") and values.get("ckpt_step") is not None:
        yield from _step(Path(values["load"]), values["ckpt_step"])
    for name in ("save", "save_hf", "tensorboard_dir"):
        if values.get(name):
            yield from _folder(name, Path(values[name]))
    if values.get("metrics_jsonl"):
        metrics = Path(values["metrics_jsonl"]).absolute()
        if metrics.is_dir():
            yield Complaint("file", f"--metrics-jsonl {metrics} is a folder.", f"Give {metrics / 'metrics.jsonl'}.")
        yield from _folder("metrics_jsonl", metrics.parent)
    if values.get("save_hf") and values.get("load_hf") and Path(values["save_hf"]) == Path(values["load_hf"]):
        yield Complaint(
            "file", f"--save-hf {values['save_hf']} is where --load-hf takes its weights from.", "Give another folder."
        )


def _saves_where_it_loads(values: Mapping[str, Any]) -> bool:
    load, save = values.get("load"), values.get("save")
    return load is not None and save is not None and Path(load) == Path(save)


def _missing(name: str, path: str) -> Complaint:
    fix = near_path(path, NAMED_DATA if name.endswith("data_path") else ())
    if name in ("load_hf", "tokenizer_model") and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        fix += " Nothing is downloaded: for a name on the Hub, give the folder it was downloaded to."
    return Complaint("file-missing", f"{FLAGS[name].spelling} {path} does not exist.", fix)


def _tokenizer(path: Path) -> Iterator[Complaint]:
    if path.is_dir() and not any(found for name in _TOKENIZER_FILES for found in path.glob(name)):
        yield Complaint(
            "file",
            f"--tokenizer-model {path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}).",
            "Give a sentencepiece model, a tokenizer.json, or the folder of a Hugging Face tokenizer.",
        )


def _checkpoint(path: Path) -> Iterator[Complaint]:
    """A folder to load from must hold a checkpoint; the mistakes are one floor too high, too low, or another form."""
    if (path / "latest").exists() or any(path.glob("iter_*")) or not path.is_dir():
        return
    fix = "Nothing was saved there yet."
    below = sorted(str(file.parent) for file in path.glob("*/latest"))
    if below:
        fix = f"Did you mean {either(below[:3])}?"
    elif (path / "layout.json").exists():
        fix = f"It is one checkpoint itself: give the folder that holds it, --load {path.absolute().parent}."
    elif (path / "config.json").exists():
        fix = f"It holds a Hugging Face model: did you mean --load-hf {path}?"
    yield Complaint("checkpoint-missing", f"--load {path} holds no checkpoint (no file latest, no iter_*).", fix)


def saved_steps(path: Path) -> list[int]:
    """Iterations of the checkpoints in a folder, oldest first."""
    names = (one.name.removeprefix("iter_") for one in path.glob("iter_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _step(path: Path, step: int) -> Iterator[Complaint]:
    there = saved_steps(path)
    if there and step not in there:
        yield Complaint(
            "checkpoint-missing",
            f"--load {path} has no checkpoint of --ckpt-step {step}.",
            f"It has those of {', '.join(map(str, there[-MOST_STEPS:]))}.",
        )


def _published(path: Path) -> Iterator[Complaint]:
    """Of a folder without config.json somebody else complains."""
    if (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        yield Complaint(
            "file",
            f"--load-hf {path} has a config.json and no weights (*.safetensors).",
            "Give the whole folder; weights in another form are saved as safetensors by transformers' save_pretrained.",
        )


def _data(name: str, path: str) -> Iterator[Complaint]:
    if path in NAMED_DATA:
        return
    if Path(path).exists() and not path.endswith((".bin", ".idx")):
        if Path(path).is_file() and not Path(path).stat().st_size:
            yield Complaint("file", f"{FLAGS[name].spelling} {path} is empty.", "Give a file with text in it.")
        elif Path(path).is_dir() and not listing(Path(path)).taken:
            reason = nothing_read(Path(path))
            yield Complaint("file", f"{FLAGS[name].spelling} {path}: {reason}.", "Give one with such files in it.")
        elif reason := refusal_of(Path(path)) if Path(path).is_file() else "":
            yield Complaint("file", f"{FLAGS[name].spelling} {path} cannot be read as text.", f"It is {reason}.")
        return
    prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
    pair = [f"{prefix}{suffix}" for suffix in (".bin", ".idx")]
    missing = [one for one in pair if not Path(one).exists()]
    if len(missing) == 2:
        yield _missing(name, path)
    elif missing:
        there = next(one for one in pair if one not in missing)
        yield Complaint("file-missing", f"{FLAGS[name].spelling} {path}: {there} is there, {missing[0]} is not.")


def _first_record(name: str, path: Path, field: str) -> Iterator[Complaint]:
    """What is wrong with all of a file is wrong with its first line: the field, the encoding, the kind of file.

    Files of other kinds are read as text, too, but may be data of their own; what needs a package is left to the run.
    """
    kind = kind_of(path)
    packed = path.suffix.lower() == ZSTANDARD and sys.version_info < (3, 14)
    if kind not in (*JSONL, *TEXT) or packed or not path.is_file() or not os.access(path, os.R_OK):
        return
    place = f"{FLAGS[name].spelling} {path}, line 1"
    try:
        with opened(path) as file:
            line = file.readline(LONGEST_LOOK)
        if line.strip() and len(line) < LONGEST_LOOK:
            if kind in JSONL:
                text_of_line(line, place, field)
            else:
                decoded(line, place)
    except DataError as error:
        yield Complaint("record", f"{error}.")


def _folder(name: str, path: Path) -> Iterator[Complaint]:
    """The folder, or the nearest one above it that exists, must be a folder that can be written."""
    spelling = FLAGS[name].spelling
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.exists():
            if not folder.is_dir():
                yield Complaint("file", f"{spelling}: {folder} is a file, where a folder is needed.")
            elif not os.access(folder, os.W_OK | os.X_OK):
                yield Complaint("file", f"{spelling}: folder {folder} cannot be written.")
            return
