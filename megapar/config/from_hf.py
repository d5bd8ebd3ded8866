"""``--load-hf`` and converted checkpoints: the sizes of a published model in place of defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megapar.config.config import FLAGS
from megapar.config.draft import Draft
from megapar.config.published import Unsupported, architecture_of, flags_of, read_config, remarks
from megapar.schema.flag import SCRIPTS

BESIDE = "hf"
"""Folder in a converted checkpoint's: what the published folder has and a checkpoint has no place for."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_FREE = ("hidden_dropout", "attention_dropout")  # of training, not of the model


def published_folder(load_hf: str | None, load: str | None) -> str | None:
    """The Hugging Face folder that a run's model is from: --load-hf, or what a converted checkpoint has beside it."""
    if load_hf or not load:
        return load_hf
    beside = Path(load) / BESIDE
    return str(beside) if (beside / "config.json").is_file() else None


def take_published(draft: Draft) -> str | None:
    """Fill in what the folder's config.json says where nobody has set it; a flag that contradicts it is a complaint.

    The folder's class; None where there is none that can be read. A missing folder is another complaint.
    """
    load_hf, load = (draft.values.get(name) for name in ("load_hf", "load"))
    name = published_folder(load_hf, load)
    if not name or not Path(name).is_dir():
        return None
    said = f"--load-hf {name}" if load_hf else f"--load {load} (its {BESIDE}/config.json)"
    try:
        config = read_config(name)
        kind, flags = flags_of(config)
    except Unsupported as error:
        draft.complain("load-hf", f"{said}: {error}.")
        return None
    if kind != draft.kind:
        draft.complain("load-hf", f"{said} is a model of {SCRIPTS[kind]}, not of {SCRIPTS[draft.kind]}.")
        return None
    draft.warnings += [f"{said}: {remark}" for remark in remarks(config)]
    architecture = architecture_of(config)
    _take_sizes(draft, said, flags, free_depth=architecture.sets("mtp_depth"))
    has_tokenizer = any((Path(name) / one).exists() for one in TOKENIZER_FILES)
    if draft.origins.get("tokenizer_model") == "default" and has_tokenizer:
        draft.values["tokenizer_model"] = name
        draft.origins["tokenizer_model"] = "derived"
    return architecture.name


def _take_sizes(draft: Draft, said: str, flags: dict[str, Any], free_depth: bool) -> None:
    """free_depth: --mtp-depth may differ: a block that the folder lacks is initialized, an unwanted one is left out."""
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
            draft.complain("load-hf", f"{spelled} {draft.values[flag]} contradicts {said}: {value}.", fix)
