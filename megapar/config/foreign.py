"""Checkpoints of other frameworks, recognised by the names of their files: nothing of them is opened."""

from __future__ import annotations

from pathlib import Path

FIX = (
    "Such checkpoints come in by way of Hugging Face: Megatron Bridge, or the framework's converter, writes a folder "
    "in that form, and --load-hf reads it."
)
_RANK_FILE = "mp_rank_*/model_optim_rng.pt"
_FORMS = (
    (
        "a checkpoint of DeepSpeed",
        ("*mp_rank_*_model_states.pt", "*/*mp_rank_*_model_states.pt"),
    ),
    ("a checkpoint of Megatron-LM, a file per rank", (_RANK_FILE, f"*/{_RANK_FILE}")),
    (
        "a distributed checkpoint of Megatron-LM",
        ("common.pt", "*/common.pt", "*.distcp", "*/*.distcp"),
    ),
    ("a checkpoint folder of Megatron-LM", ("latest_checkpointed_iteration.txt",)),
)


def foreign_checkpoint(folder: Path) -> str | None:
    """What another framework has saved in a folder, be it one iteration or several; None for anything else."""
    if (folder / "layout.json").is_file() or any(folder.glob("iter_*/layout.json")):
        return None
    return next((form for form, patterns in _FORMS if any(any(folder.glob(one)) for one in patterns)), None)
