"""The start of a run from a Hugging Face folder: every rank reads its own shards."""

from __future__ import annotations

from pathlib import Path

from megapar.config.published import architecture_of, read_config
from megapar.core.box import Box
from megapar.model.architectures import ARCHITECTURES
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.published_tensors import pieces_of, some
from megapar.schema.published import PublishedArchitecture
from megapar.training.checkpoints.model_match import MTP, fitted_folder
from megapar.training.step.job import Job


def trained_architecture(folder: Path) -> PublishedArchitecture:
    """Return the class that a run exports if it started from the folder."""
    name = architecture_of(read_config(folder)).name
    return ARCHITECTURES[ARCHITECTURES[name].trained_as or name]


def load_hf(folder: Path, job: Job) -> tuple[str, ...]:
    """Fill the weights and return notes for the log.

    A masked language model has no sentence-order head, and many decoders' folders have no multi-token prediction block.
    The model then keeps its initial one. Raises CheckpointError, before anything is filled, for missing, misshapen or
    unreadable tensors.
    """
    architecture, weights = architecture_of(read_config(folder)), HfFolder(folder)
    lacking, foreign = fitted_folder(weights, job.table, architecture)
    own: set[str] = {*pieces_of(job.table, architecture)}
    if not any(spec.name.startswith(MTP.prefixes) for spec in job.table):
        own |= {*architecture.shared}  # copies that belong to a block which is not trained
    weights.check_tied(architecture, own, job.world.rank, job.world.grid.world_size)
    rows = {spec.name: spec for spec in job.table}
    for view in job.sharding.views([shard.master for shard in job.sharding.master_shards]):
        spec = rows[view.spec.name]
        if weights.holds(spec, architecture):
            weights.fill(view.tensor, spec, view.box, architecture)
    buffers = dict(job.model.named_buffers())
    for spec in job.table:
        # A pipeline stage has only the buffers of its layers.
        if not spec.trainable and spec.name in buffers and weights.holds(spec, architecture):
            weights.fill(buffers[spec.name], spec, Box.whole(spec.shape), architecture)
    job.sharding.start_param_gather()
    notes = [f"weights: {folder} ({architecture.name})"]
    if weights.in_fp8:
        notes.append(
            f"{weights.in_fp8} tensors of {folder} are in FP8; they are dequantized, and never exported in FP8"
        )
    if foreign:
        notes.append(f"{len(foreign)} tensors of {folder} have no place in the model: {some(foreign)}")
    notes += [f"{folder} has no {block.name}; training starts from its initial weights" for block in lacking]
    return tuple(notes)
