"""Checkpoints of other frameworks, recognized by file names alone; no file is opened."""

from __future__ import annotations

from pathlib import Path

from megapar.files.checkpoint_names import LAYOUT_FILE, holds_checkpoints

FIX = (
    "Convert it to Hugging Face format with Megatron Bridge or the framework's own converter, and pass that folder "
    "with --load-hf."
)
_RANK_FILE = "mp_rank_*/model_optim_rng.pt"
_FORMS = (
    (
        "a DeepSpeed checkpoint",
        ("*mp_rank_*_model_states.pt", "*/*mp_rank_*_model_states.pt"),
    ),
    ("a Megatron-LM checkpoint with a file per rank", (_RANK_FILE, f"*/{_RANK_FILE}")),
    (
        "a distributed Megatron-LM checkpoint",
        ("common.pt", "*/common.pt", "*.distcp", "*/*.distcp"),
    ),
    ("a Megatron-LM checkpoint folder", ("latest_checkpointed_iteration.txt",)),
)


def foreign_checkpoint(folder: Path) -> str | None:
    """Describe the checkpoint of another framework in a folder, one iteration or several; None for anything else."""
    if (folder / LAYOUT_FILE).is_file() or holds_checkpoints(folder):
        return None
    return next((form for form, patterns in _FORMS if any(any(folder.glob(one)) for one in patterns)), None)
