"""A run's start from a Hugging Face folder: every rank reads the parts that it holds."""

from __future__ import annotations

from pathlib import Path

from megapar.config.published import architecture, read_config
from megapar.core.box import Box
from megapar.model.hugging_face.family import FAMILIES, Family, family_of_config
from megapar.model.hugging_face.folder import HfFolder, pieces_of
from megapar.model.hugging_face.save import some
from megapar.training.fit import MTP, SENTENCE_ORDER
from megapar.training.job import Job

_MTP_FILES = "model.mtp_"


def family_of(folder: Path) -> Family:
    """The family of a folder; its config.json has been read by the command line before."""
    config = read_config(folder)
    return family_of_config(architecture(config), config)


def trained_family(folder: Path) -> Family:
    """The family of what a run trained that started from the folder: an encoder has both heads and task types."""
    family = family_of(folder)
    return FAMILIES["ErnieForPreTraining"] if family.name.startswith("ErnieFor") else family


def load_hf(folder: Path, job: Job) -> tuple[str, ...]:
    """Fill the weights; what people should know of it.

    A masked language model has no sentence-order head, and many decoders' folders no multi-token prediction block: the
    model keeps its initial one. Raises CheckpointError, before anything is filled, for missing, misshapen and
    unreadable tensors.
    """
    family, weights = family_of(folder), HfFolder(folder)
    lacking = SENTENCE_ORDER.prefixes if family.name == "ErnieForMaskedLM" else ()
    lacking = lacking if any(name.startswith(_MTP_FILES) for name in weights.tensors) else (*lacking, *MTP.prefixes)
    initial = [spec.name for spec in job.table if spec.name.startswith(lacking)]
    foreign = weights.check(job.table, family, optional=initial)
    weights.check_tied(pieces_of(job.table, family), job.world.rank, job.world.grid.world_size)
    rows = {spec.name: spec for spec in job.table}
    for view in job.sharding.views([part.master for part in job.sharding.parts]):
        spec = rows[view.spec.name]
        if weights.holds(spec, family):
            weights.fill(view.tensor, spec, view.box, family)
    buffers = dict(job.model.named_buffers())
    for spec in job.table:
        # A stage of a pipeline has those of its own layers.
        if not spec.trainable and spec.name in buffers and weights.holds(spec, family):
            weights.fill(buffers[spec.name], spec, Box.whole(spec.shape), family)
    job.sharding.publish()
    notes = [f"weights: {folder} ({family.name})"]
    if foreign:
        notes.append(f"{len(foreign)} tensors of {folder} have no place in the model: {some(foreign)}")
    if initial:
        what = (MTP if initial[0].startswith(MTP.prefixes) else SENTENCE_ORDER).name
        notes.append(f"{folder} has no {what}; it starts anew")
    return tuple(notes)
