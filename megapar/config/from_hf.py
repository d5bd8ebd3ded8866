"""``--load-hf`` and converted checkpoints: the sizes of a published model replace the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megapar.checkpoints.format.names import names_in
from megapar.config.config import FLAGS
from megapar.config.draft import Draft
from megapar.config.published import Unsupported, architecture_of, flags_of, read_config, remarks
from megapar.files.location import Place, at
from megapar.files.tensor_file import CONFIG_FILE
from megapar.schema.flag import SCRIPTS

BESIDE = "hf"
"""Subfolder of a converted checkpoint's folder, for the published model's files that a checkpoint cannot store."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_FREE = ("hidden_dropout", "attention_dropout")  # properties of training, not of the model


def has_tokenizer(folder: Place) -> bool:
    """Return True if a published folder has a tokenizer."""
    return not {*TOKENIZER_FILES}.isdisjoint(names_in(folder))


def published_folder(load_hf: str | None, load: str | None) -> str | None:
    """Return the Hugging Face folder of a run's model: --load-hf, or the one inside a converted checkpoint's folder."""
    if load_hf or not load:
        return load_hf
    beside = at(load) / BESIDE
    return str(beside) if (beside / CONFIG_FILE).is_file() else None


def take_published(draft: Draft) -> str | None:
    """Fill in the flags that the folder's config.json determines, and complain about flags that contradict it.

    Returns the folder's class, or None if there is no readable folder. ``check_files`` complains about a missing one.
    """
    load_hf, load = (draft.values.get(name) for name in ("load_hf", "load"))
    name = published_folder(load_hf, load)
    if not name or (load_hf and not Path(load_hf).is_dir()):
        return None
    source = f"--load-hf {name}" if load_hf else f"--load {load} (its {BESIDE}/config.json)"
    try:
        config = read_config(name)
        kind, flags = flags_of(config)
    except Unsupported as error:
        draft.complain("load-hf", f"{source}: {error}.")
        return None
    if kind != draft.kind:
        message = f"{source} is a model for {SCRIPTS[kind]}, not for {SCRIPTS[draft.kind]}."
        draft.complain("load-hf", message, f"Start {SCRIPTS[kind]}, or megapar pretrain {kind}.")
        return None
    draft.warnings += [f"{source}: {remark}" for remark in remarks(config)]
    architecture = architecture_of(config)
    _take_sizes(draft, source, flags, free_depth=architecture.sets("mtp_depth"))
    if draft.origins.get("tokenizer_model") == "default" and has_tokenizer(name):
        draft.values["tokenizer_model"] = name
        draft.origins["tokenizer_model"] = "derived"
    return architecture.name


def _take_sizes(draft: Draft, source: str, flags: dict[str, Any], free_depth: bool) -> None:
    """Set the flags that config.json determines.

    With ``free_depth``, --mtp-depth may differ: a block that the folder lacks is initialized, a surplus one is dropped.
    """
    for flag, value in flags.items():
        if draft.origins.get(flag) == "default":
            draft.values[flag] = value
            draft.origins[flag] = "derived"
        elif flag in draft.values and draft.values[flag] != value:
            if flag == "max_position_embeddings" and flags.get("position_embedding_type") == "rope":
                continue  # rotary positions have no table
            if flag in _FREE:
                continue
            if flag == "mtp_depth" and free_depth:
                continue
            spelled = FLAGS[flag].spelling
            fix = f"Leave {spelled} out."
            draft.complain("load-hf", f"{spelled} {draft.values[flag]} contradicts {source}: {value}.", fix)
