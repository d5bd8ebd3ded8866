"""``--load-hf``: the sizes of a published model take the place of defaults; contradicting flags are complaints."""

from __future__ import annotations

from pathlib import Path

from megapar.config.config import FLAGS
from megapar.config.draft import Draft
from megapar.config.flag import SCRIPTS
from megapar.config.published import Unsupported, architecture, flags_of, read_config

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_FREE = ("max_position_embeddings",)  # rotary positions have no table


def take_published(draft: Draft) -> None:
    """Fill in what the folder's config.json says where nobody has set it. A missing folder is another complaint."""
    name = draft.values.get("load_hf")
    if not name or not Path(name).is_dir():
        return
    try:
        config = read_config(name)
        kind, flags = flags_of(config)
    except Unsupported as error:
        draft.complain("load-hf", f"--load-hf {name}: {error}.")
        return
    if kind != draft.kind:
        draft.complain("load-hf", f"--load-hf {name} is a model of {SCRIPTS[kind]}, not of {SCRIPTS[draft.kind]}.")
        return
    for flag, value in flags.items():
        if draft.origins.get(flag) == "default":
            draft.values[flag] = value
            draft.origins[flag] = "derived"
        elif flag in draft.values and draft.values[flag] != value:
            if flag in _FREE and flags.get("position_embedding_type") == "rope":
                continue
            if flag == "mtp_depth" and architecture(config).startswith("Ernie4_5"):
                continue  # a block that the folder lacks starts anew; one that nobody wants is left out
            spelled = FLAGS[flag].spelling
            fix = f"Leave {spelled} out."
            draft.complain("load-hf", f"{spelled} {draft.values[flag]} contradicts --load-hf {name}: {value}.", fix)
    if draft.origins.get("tokenizer_model") == "default" and any((Path(name) / one).exists() for one in _TOKENIZERS):
        draft.values["tokenizer_model"] = name
        draft.origins["tokenizer_model"] = "derived"
