"""Export of the trained model as a Hugging Face folder, from any layout."""

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
from megapar.training.checkpoints.collect import collect_all, collect_buffers
from megapar.training.checkpoints.load_hf import trained_architecture
from megapar.training.step.dtypes import compute_dtype
from megapar.training.step.job import Job

UNDROPPED = (
    "the exported Hugging Face model does not drop tokens; this run drops tokens over the capacity, also in "
    "evaluations, so the losses of the exported model differ"
)


def export(config: Config, job: Job, tokenizer: Tokenizer | None) -> Path | None:
    """Write the model to ``--save-hf``, with the settings of the published folder that the run started from, if any.

    Returns the folder, or None without --save-hf.
    """
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
    """Write weights, configuration and tokenizer in the format of ``transformers``. Every rank must call it.

    Rank 0 holds one whole parameter at a time.

    Args:
        folder: Folder to write.
        job: This rank's part of the model.
        tokenizer: None if the run has none.
        dtype: dtype of the weights.
        architecture: Class of the published folder that the run started from. None without one.
        published: config.json of that folder, whose keys remain unless the run changed what they set.
    """
    tensors = _whole(job)
    if job.world.rank == 0:
        ids, beside = token_ids(tokenizer, published), None if tokenizer is None else tokenizer.save_hf
        hf.save_hf(
            folder,
            job.sizes,
            tensors,
            dtype,
            token_ids=ids,
            architecture=architecture,
            published=published,
            beside=beside,
        )
    else:
        for _ in tensors:
            pass


def _whole(job: Job) -> Iterator[tuple[str, Tensor]]:
    masters = [shard.master for shard in job.sharding.master_shards]
    yield from collect_all(job.world, job.table, job.sharding, masters)
    yield from collect_buffers(job.world, job.table, dict(job.model.named_buffers()), masters[0].dtype)
