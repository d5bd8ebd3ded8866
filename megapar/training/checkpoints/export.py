"""The trained model as a Hugging Face folder, from any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megapar.arguments import Config
from megapar.config.from_hf import published_folder
from megapar.config.published import read_config
from megapar.data.tokenizers.tokenizer import Tokenizer, token_ids
from megapar.model.hugging_face import save as hf
from megapar.schema.published import PublishedArchitecture
from megapar.training.building.build import compute_dtype
from megapar.training.building.job import Job
from megapar.training.checkpoints.collect import collect_all, collect_buffers
from megapar.training.checkpoints.load_hf import trained_architecture

UNDROPPED = (
    "the model in Hugging Face's form drops no token; this run drops those that find no room, in evaluations too, so "
    "that its losses there are others"
)


def export(config: Config, job: Job, tokenizer: Tokenizer | None) -> Path | None:
    """Write the model to ``--save-hf`` with what the published folder says that the run began with; None without it."""
    if not config.checkpoint.save_hf:
        return None
    folder = Path(config.checkpoint.save_hf)
    started_from = published_folder(config.checkpoint.load_hf, config.checkpoint.load)
    architecture = trained_architecture(Path(started_from)) if started_from else None
    published = read_config(started_from) if started_from else {}
    save_hf(folder, job, tokenizer, compute_dtype(config, job.world.device), architecture, published)
    return folder


def save_hf(
    folder: Path,
    job: Job,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    architecture: PublishedArchitecture | None = None,
    published: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write weights, configuration and tokenizer so that ``transformers`` loads them; every rank must call it.

    Whole parameters pass rank 0 one at a time. tokenizer: None where the run had none. architecture, published: class
    to write and config.json of the folder that the run was started from, if there was one.
    """
    tensors = _whole(job)
    if job.world.rank == 0:
        ids, beside = token_ids(tokenizer, published), None if tokenizer is None else tokenizer.save_hf
        hf.save_hf(folder, job.sizes, tensors, dtype, token_ids=ids, architecture=architecture, beside=beside)
    else:
        for _ in tensors:
            pass


def _whole(job: Job) -> Iterator[tuple[str, Tensor]]:
    masters = [part.master for part in job.sharding.parts]
    yield from collect_all(job.world, job.table, job.sharding, masters)
    yield from collect_buffers(job.world, job.table, dict(job.model.named_buffers()), masters[0].dtype)
