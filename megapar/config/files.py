"""Do the files that a configuration names exist, and can it write where it wants to?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megapar.config.check_data import check_data, check_knowledge, missing
from megapar.config.config import FLAGS
from megapar.config.foreign import FIX, foreign_checkpoint
from megapar.config.latest_name import of_name
from megapar.config.regular_file import INDEX_BYTES, read_regular
from megapar.config.stored import LAYOUT
from megapar.config.suspects import suspects
from megapar.config.vocab_size import check_vocabulary
from megapar.errors import Complaint
from megapar.schema.rule import either

MOST_STEPS = 8  # of a message
_HF_INDEX = "model.safetensors.index.json"
# One of them is in every folder with a tokenizer; sentencepiece's may have any name before ``.model``.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")


def check_files(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Complaints about paths; values that are missing or None are passed over."""
    yield from check_data(values)
    for name in ("tokenizer_model", "load", "load_hf", "phrase_file", "entity_file", "triples_file"):
        path = values.get(name)
        # One folder for --load and --save is how a script is written that is queued again: its first run makes it.
        first_run = name == "load" and _saves_where_it_loads(values)
        if path is not None and not Path(path).exists() and not first_run:
            yield missing(name, path)
    for name in ("phrase_file", "entity_file", "triples_file"):
        if values.get(name) and Path(values[name]).is_file():
            yield from check_knowledge(name, Path(values[name]))
    if values.get("tokenizer_model"):
        no_tokenizer = list(_tokenizer(Path(values["tokenizer_model"])))
        yield from no_tokenizer or check_vocabulary(values)
    if values.get("load"):
        yield from _loaded(values)
    if values.get("load_hf"):
        yield from _published(Path(values["load_hf"]))
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


def _loaded(values: Mapping[str, Any]) -> Iterator[Complaint]:
    path = Path(values["load"])
    if path.is_file():
        yield Complaint("file", f"--load {path} is a file.", "It takes a checkpoint folder.")
        return
    if foreign := foreign_checkpoint(path):
        yield Complaint("checkpoint-foreign", f"--load {path} is {foreign}.", FIX)
        return
    none = [] if _saves_where_it_loads(values) else list(_checkpoint(path))
    none += _only_suspects(path) if values.get("ckpt_step") is None else []
    yield from none
    if not none and values.get("ckpt_step") is not None:
        yield from _step(path, values["ckpt_step"])


def _saves_where_it_loads(values: Mapping[str, Any]) -> bool:
    load, save = values.get("load"), values.get("save")
    return load is not None and save is not None and Path(load) == Path(save)


def _tokenizer(path: Path) -> Iterator[Complaint]:
    if path.is_dir() and not any(found for name in _TOKENIZER_FILES for found in path.glob(name)):
        yield Complaint(
            "file",
            f"--tokenizer-model {path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}).",
            "Give a sentencepiece model, a tokenizer.json, or the folder of a Hugging Face tokenizer.",
        )


def _checkpoint(path: Path) -> Iterator[Complaint]:
    """A folder to load from must hold a checkpoint; the mistakes are one floor too high, too low, or another form."""
    if not path.is_dir() or any(path.glob(f"iter_*/{LAYOUT}")):
        return
    fix = "Nothing was saved there yet."
    below = sorted(str(file.parent) for file in path.glob("*/latest"))
    if below:
        fix = f"Did you mean {either(below[:3])}?"
    elif (path / "layout.json").exists():
        fix = f"It is one checkpoint itself: give the folder that holds it, --load {path.absolute().parent}."
    elif (path / "config.json").exists():
        fix = f"It holds a Hugging Face model: did you mean --load-hf {path}?"
    elif any(".tmp-" not in one.name for one in path.glob("iter_*")):
        fix = "What it holds is another program's: bring it into Hugging Face's form there, and give it by --load-hf."
    elif any(path.glob("iter_*")):
        fix = "It holds only a save that was not finished: start without --load."
    yield Complaint("checkpoint-missing", f"--load {path} holds no checkpoint (no iter_*/{LAYOUT}).", fix)


def saved_steps(path: Path) -> list[int]:
    """Iterations of the checkpoints in a folder, oldest first."""
    return sorted({name[0] for one in path.glob("iter_*") if (name := of_name(one.name))})


def _only_suspects(path: Path) -> Iterator[Complaint]:
    """A run that found wrong numbers is not gone on with by accident, nor started anew over what it left."""
    aside = [folder.name for folder in suspects(path).values()]
    if aside and not saved_steps(path):
        more = ", ".join(aside[-MOST_STEPS:])
        message = f"--load {path} holds only checkpoints that were set aside, as they may hold a fault: {more}."
        yield Complaint("checkpoint", message, "Give --ckpt-step N to take one all the same.")


def _step(path: Path, step: int) -> Iterator[Complaint]:
    there = sorted({*saved_steps(path), *suspects(path)})
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
        return
    try:
        index = json.loads(read_regular(path / _HF_INDEX, INDEX_BYTES))
        lacking = sorted(name for name in set(index["weight_map"].values()) if not (path / name).exists())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # without one, or with one that the run refuses
        return
    if lacking:
        more = f" and {len(lacking) - MOST_STEPS} more" if len(lacking) > MOST_STEPS else ""
        message = f"--load-hf {path} lacks {', '.join(lacking[:MOST_STEPS])}{more}, which its {_HF_INDEX} names."
        yield Complaint("file", message, "Download the whole folder.")


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
