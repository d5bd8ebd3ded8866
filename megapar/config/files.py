"""Checks that the files named by a configuration exist, and that its output folders can be written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megapar.checkpoints.format.faults import suspects
from megapar.checkpoints.format.names import (
    FOREIGN_FIX,
    LATEST,
    LAYOUT_FILE,
    folders_below,
    foreign_checkpoint,
    holds_checkpoints,
    names_in,
    newest_name,
    read_latest,
    saved_iterations,
    stored_scalars,
)
from megapar.config.check_data import check_data, check_knowledge, check_tasks, missing
from megapar.config.config import FLAGS
from megapar.config.draft import Draft
from megapar.config.run import METRICS_OFF, SFT
from megapar.config.vocab_size import MOCK, check_vocabulary
from megapar.errors import Complaint
from megapar.files.data_files import split_name
from megapar.files.location import Location, Place, at, same_place
from megapar.files.paths import METRICS, is_url
from megapar.files.regular_file import INDEX_BYTES, read_json
from megapar.files.tensor_file import CONFIG_FILE, INDEX_FILE
from megapar.files.tokenizer_files import FOLDER, TOKENIZER_FILES, foreign_tokenizer, stored_fingerprint
from megapar.files.uri import MEMORY, is_stored, masked, missing_package, with_both_slashes, wrong_form
from megapar.launch_environment import starts_before
from megapar.schema.rule import either, spell

MOST_STEPS = 8  # listed in a message


def check_model(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield a complaint if the folder that the model's sizes are read from is missing."""
    path = values.get("load_hf")
    if path is not None and not at(path).exists():
        yield missing("load_hf", path)


def check_files(values: Mapping[str, Any], *, restart: bool = False) -> Iterator[Complaint]:
    """Yield complaints about paths; values that are missing or None are skipped.

    ``restart``: The job was started before. It may go on from its own checkpoints, whatever --load has by now.
    """
    yield from check_data(values)
    yield from check_model(values)
    yield from check_stores(values)
    for name in ("tokenizer_model", "chat_template", "load", "phrase_file", "entity_file", "triples_file"):
        path = values.get(name)
        # A script that is queued repeatedly uses one folder for --load and --save, which its first run creates.
        first_run = name == "load" and (restart or same_place(values.get("load"), values.get("save")))
        if path is not None and not at(path).exists() and not first_run:
            yield missing(name, path)
    for name in ("phrase_file", "entity_file", "triples_file"):
        if values.get(name) and Path(values[name]).is_file():
            yield from check_knowledge(name, Path(values[name]))
    yield from check_tasks(values.get("eval_tasks") or ())
    if values.get("tokenizer_model"):
        no_tokenizer = list(_tokenizer(Path(values["tokenizer_model"])))
        yield from no_tokenizer or check_vocabulary(values)
        if values.get("task") == SFT and not values.get("chat_template") and not no_tokenizer:
            yield from _no_template(Path(values["tokenizer_model"]))
    if values.get("load") and not is_stored(values["load"]) and not restart:
        yield from _loaded(values)
    if values.get("load_hf") and not is_stored(values["load_hf"]):
        yield from _published(Path(values["load_hf"]))
    for name in ("save", "save_hf", "tensorboard_dir", "wandb_save_dir", "swanlab_save_dir"):
        if values.get(name) and (path := at(values[name]).local_path()) is not None:
            yield from _folder(name, path)
    if values.get("metrics_jsonl") not in (None, METRICS_OFF):
        yield from _metrics(Path(values["metrics_jsonl"]).absolute(), values.get("save"))
    yield from check_packages(values)
    if same_place(values.get("save_hf"), values.get("load_hf")):
        yield Complaint(
            "file", f"--save-hf {values['save_hf']} is also the folder of --load-hf.", "Pass a different folder."
        )


def check_stores(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield complaints about URIs, by their form and by packages alone: a run asks the store when it starts."""
    for flag in FLAGS.values():
        value = values.get(flag.name) if flag.store else None
        words = value if isinstance(value, tuple) else (value or "",)
        places = [split_name(word)[1] if flag.named else word for word in words]
        for uri in filter(None, map(with_both_slashes, places)):
            message = f"{flag.spelling} {masked(uri).replace('://', ':/', 1)} is a path on a disk, not in a bucket."
            yield Complaint("store", message, f"Write {masked(uri)}.")
        for uri in filter(is_url, places):
            wrong, lacking = wrong_form(uri), missing_package(uri)
            rule, (problem, fix) = ("store", wrong) if wrong[0] else ("package", lacking)
            if problem:
                yield Complaint(rule, f"{flag.spelling} {masked(uri)} {problem}.", fix)
            elif uri.lower().startswith(f"{MEMORY}://") and values.get("world_size", 1) > 1:
                message = f"{flag.spelling} {uri} is the memory of one process, and the run has {values['world_size']}."
                yield Complaint("store", message, "Choose a store that all ranks reach.")


def _no_template(tokenizer: Path) -> Iterator[Complaint]:
    """Complain about a tokenizer without a chat template; one that is refused by transformers is the run's matter."""
    with suppress(OSError, ValueError):
        settings = read_json(tokenizer / "tokenizer_config.json", INDEX_BYTES)
        if not settings.get("chat_template") and not (tokenizer / "chat_template.jinja").exists():
            message = f"--task sft needs a chat template, which the tokenizer {tokenizer} does not have."
            yield Complaint("file", message, "Pass one as --chat-template FILE.")


def _metrics(path: Path, save: str | None) -> Iterator[Complaint]:
    if path.is_dir():
        yield Complaint("file", f"--metrics-jsonl {path} is a folder.", f"Pass {path / METRICS}.")
    if save is None or path.parent != Path(save).absolute():  # that folder has its own complaint
        yield from _folder("metrics_jsonl", path.parent)


def _loaded(values: Mapping[str, Any]) -> Iterator[Complaint]:
    root = at(values["load"])
    with suppress(OSError):  # the loader reports a folder that cannot be read
        if root.is_file():
            yield Complaint("file", f"--load {root} is a file.", "Pass a checkpoint folder.")
            return
    if foreign := foreign_checkpoint(root):
        yield Complaint("checkpoint-foreign", f"--load {root} is {foreign}.", FOREIGN_FIX)
        return
    same, step = same_place(values.get("load"), values.get("save")), values.get("ckpt_step")
    none = [] if same else list(_checkpoint(root))
    none += _only_suspects(root) if step is None else []
    yield from none
    if not none and step is not None:
        yield from _step(root, step, same)
    elif not none and not saved_iterations(root) and (latest := read_latest(root)) is not None:
        message = f"{root / LATEST} names {latest[0]!r}, which is not there, nor is any other checkpoint."
        yield Complaint("checkpoint", message, f"Remove {root / LATEST} to start from nothing.")


def _tokenizer(path: Path) -> Iterator[Complaint]:
    if foreign := foreign_tokenizer(path):
        yield Complaint("tokenizer", f"--tokenizer-model {path} cannot be read: {foreign}.")
    elif path.is_dir() and not any(found for name in TOKENIZER_FILES for found in path.glob(name)):
        yield Complaint(
            "file",
            f"--tokenizer-model {path} contains no tokenizer (none of {', '.join(TOKENIZER_FILES)}).",
            "Pass a sentencepiece model, a tokenizer.json, or the folder of a Hugging Face tokenizer.",
        )


def _checkpoint(root: Location) -> Iterator[Complaint]:
    """Complain about a folder without checkpoints: usually one level too high or too low, or another format."""
    if not root.exists() or holds_checkpoints(root):
        return
    names = names_in(root)
    saves = [name for name in names if name.startswith("iter_")]
    fix = "Nothing has been saved there yet."
    if below := folders_below(root):
        fix = f"Did you mean {either(below[:3])}?"
    elif LAYOUT_FILE in names:
        fix = f"It is a single checkpoint: pass the folder that contains it, --load {root.resolve().parent}."
    elif CONFIG_FILE in names:
        fix = f"It contains a Hugging Face model: did you mean --load-hf {root}?"
    elif any(".tmp-" not in name for name in saves):
        fix = "It is another program's checkpoint: convert it to Hugging Face format there, and pass it with --load-hf."
    elif saves:
        fix = "It contains only an unfinished save: start without --load."
    yield Complaint("checkpoint-missing", f"--load {root} contains no checkpoint (no iter_*/{LAYOUT_FILE}).", fix)


def _only_suspects(root: Location) -> Iterator[Complaint]:
    """Complain if only checkpoints that were set aside remain.

    This keeps a run that found wrong numbers from being continued, or overwritten by a fresh start, by accident.
    """
    aside = [folder.name for folder in suspects(root).values()]
    if aside and not saved_iterations(root):
        more = ", ".join(aside[-MOST_STEPS:])
        message = f"--load {root} contains only checkpoints that were set aside because they may be corrupt: {more}."
        yield Complaint("checkpoint", message, "Set --ckpt-step N to load one nevertheless.")


def _step(root: Location, step: int, same: bool) -> Iterator[Complaint]:
    steps = sorted({*saved_iterations(root), *suspects(root)})
    if step not in steps and (steps or same):  # another folder without any has its own complaint
        has = f"It has those of {', '.join(map(str, steps[-MOST_STEPS:]))}." if steps else "Leave --ckpt-step out."
        yield Complaint("checkpoint-missing", f"--load {root} has no checkpoint of --ckpt-step {step}.", has)


def _published(path: Path) -> Iterator[Complaint]:
    """Complain about missing weights in a published folder; ``from_hf`` checks its config.json."""
    if (path / CONFIG_FILE).is_file() and not any(path.glob("*.safetensors")):
        yield Complaint(
            "file",
            f"--load-hf {path} has a config.json but no weights (*.safetensors).",
            "Pass the complete folder; transformers' save_pretrained converts weights in other formats to safetensors. "
            f"To train such a model from nothing: megapar configs --from-hf {path} > my.yaml",
        )
        return
    try:
        index = read_json(path / INDEX_FILE, INDEX_BYTES)
        lacking = sorted(name for name in set(index["weight_map"].values()) if not (path / name).exists())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or refused by the run
        return
    if lacking:
        more = f" and {len(lacking) - MOST_STEPS} more" if len(lacking) > MOST_STEPS else ""
        message = f"--load-hf {path} lacks {', '.join(lacking[:MOST_STEPS])}{more}, listed in its {INDEX_FILE}."
        yield Complaint("file", message, "Download the complete folder.")


def _folder(name: str, path: Path) -> Iterator[Complaint]:
    """Complain unless the folder, or its nearest existing parent, is a writable folder."""
    spelling = FLAGS[name].spelling
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.is_symlink() and not folder.exists():
            message = f"{spelling}: {folder} is a link to a folder that does not exist."
            yield Complaint("file", message, "Create the folder, or remove the link.")
            return
        if folder.exists():
            if not folder.is_dir():
                yield Complaint("file", f"{spelling}: {folder} is a file, not a folder.", "Pass a different folder.")
            elif not os.access(folder, os.W_OK | os.X_OK):
                fix = "Change its permissions, or pass a different folder."
                yield Complaint("file", f"{spelling}: folder {folder} is not writable.", fix)
            return


LEXICON = ("ahocorasick", "pyahocorasick", "ernie3")
PACKAGES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "wandb_project": ("wandb",) * 3,
        "mlflow_experiment": ("mlflow",) * 3,
        "swanlab_project": ("swanlab",) * 3,
        "phrase_file": LEXICON,
        "entity_file": LEXICON,
    }
)
"""Flags that need a package that not every installation has: its module, its name, and its extra in pyproject.toml."""


def check_packages(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield a complaint for each flag whose package is not installed. Finds packages without importing them."""
    for name, (module, package, extra) in PACKAGES.items():
        if values.get(name) and find_spec(module) is None:
            message = f"{spell(name)} needs the package {package}, which is not installed."
            yield Complaint("package", message, f'Install it with: pip install "megapar[{extra}]"')


def apply_chat_date(draft: Draft) -> None:
    """Set --chat-date, if it is not given, to the day of the first start: the checkpoint's, or else today.

    As with tokenizers, a restarted job continues from its own --save folder, and a store is read by the run.
    """
    values = draft.values
    if values.get("task") != SFT or values.get("chat_date") is not None or "chat_date" in draft.bad:
        return
    restarted_from = values.get("save") if starts_before(draft.environ) else None
    load = None if values.get("finetune") else values.get("load")
    roots = ((restarted_from, None), (load, values.get("ckpt_step")))
    days = (chat_day(root, step) for root, step in roots if root and not is_stored(root))
    values["chat_date"] = next(filter(None, days), date.today().isoformat())
    draft.origins["chat_date"] = "derived"


def chat_day(root: Place, step: int | None = None) -> str:
    """Return the day that chat templates saw in the run of a checkpoint, by default the newest; "" if there is none."""
    if not (saved := saved_iterations(root)):
        return ""
    identity = stored_scalars(at(root) / newest_name(root, saved[-1] if step is None else step)).get("identity") or {}
    return str(((identity.get("phases") or [{}])[-1].get("chat") or {}).get("day") or "")


def apply_stored_tokenizer(draft: Draft) -> None:
    """Set --tokenizer-model, if it is not given, to the tokenizer that was stored with the weights.

    The weights were trained on its ids. A tokenizer trained again, on documents that have changed since, would give
    every id another meaning. A restarted job uses its own --save folder, from which it continues.
    """
    if draft.origins.get("tokenizer_model") != "default" or draft.values.get("data_path") == MOCK:
        return
    restarted_from = draft.values.get("save") if starts_before(draft.environ) else None
    for root in (restarted_from, draft.values.get("load")):
        if not root or is_stored(root):
            continue
        if stored_fingerprint(at(root) / FOLDER) is not None and saved_iterations(root):
            draft.values["tokenizer_model"] = str(at(root) / FOLDER)
            draft.origins["tokenizer_model"] = "derived"
            return
