"""The trained model as a Hugging Face folder, from any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from megapar.data.tokenizer import Tokenizer
from megapar.model import hf
from megapar.model.family import Family, config_of
from megapar.training.collect import collect_all, collect_buffers
from megapar.training.job import Job


def save_hf(
    folder: Path, job: Job, tokenizer: Tokenizer | None, dtype: torch.dtype, family: Family | None = None
) -> None:
    """Write weights, configuration and tokenizer so that ``transformers`` loads them; every rank must call it.

    Whole parameters pass rank 0 one at a time. tokenizer: None where the run had none (mock data). family: that of the
    folder the run was started from, if there was one.
    """
    tensors = _whole(job)
    if job.world.rank == 0:
        special = {} if tokenizer is None else asdict(tokenizer.special)
        ids = {f"{role}_token_id": special[role] for role in ("bos", "eos", "pad") if special.get(role) is not None}
        config = None if family is None else config_of(family, job.sizes, dtype)
        hf.save_hf(folder, job.sizes, tensors, dtype, token_ids=ids, family=family, config=config)
        if tokenizer is not None:
            tokenizer.save_hf(folder)
    else:
        for _ in tensors:
            pass


def _whole(job: Job) -> Iterator[tuple[str, Tensor]]:
    masters = [part.master for part in job.sharding.parts]
    yield from collect_all(job.world, job.table, job.sharding, masters)
    yield from collect_buffers(job.world, job.table, dict(job.model.named_buffers()), masters[0].dtype)
