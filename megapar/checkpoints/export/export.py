"""Export of the trained model as a Hugging Face folder, from any layout."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megapar.arguments import Config
from megapar.checkpoints.export.from_hf import CARRIED, trained_architecture
from megapar.checkpoints.export.to_hf import Saved, megapar_to_hf
from megapar.checkpoints.format.names import LAYOUT_FILE
from megapar.checkpoints.save_load import folder as folders
from megapar.config.published import BESIDE, has_tokenizer, published_folder, read_config
from megapar.core.comm import host_messages
from megapar.core.comm.world import World
from megapar.core.sharding.cut import is_primary, is_speaker, master_box
from megapar.core.sharding.master_shard import ParameterView
from megapar.core.sharding.sharding import Sharding
from megapar.core.status_line import Status, silent
from megapar.core.units import GIBIBYTE
from megapar.data.tokenizers.load import load_stored_tokenizer
from megapar.data.tokenizers.tokenizer import Tokenizer, token_ids
from megapar.errors import CheckpointError
from megapar.files.location import Location, Place, at
from megapar.files.regular_file import INDEX_BYTES
from megapar.model.hugging_face import save as hf
from megapar.model.parameter import ParameterSpec
from megapar.model.spec import spec_of, table_of
from megapar.training.step.dtypes import compute_dtype
from megapar.training.step.job import Job

UNDROPPED = (
    "the exported Hugging Face model does not drop tokens; this run drops tokens over the capacity, also in "
    "evaluations, so the losses of the exported model differ"
)


def export(config: Config, job: Job, tokenizer: Tokenizer | None, status: Status = silent) -> Location | None:
    """Write weights, configuration and tokenizer to ``--save-hf`` in the format of ``transformers``.

    Settings of the published folder that the run started from remain unless the run changed them. Rank 0 holds one
    whole parameter at a time. Every rank must call this. Returns the folder, or None without --save-hf.
    """
    if not config.checkpoint.save_hf:
        return None
    folder = at(config.checkpoint.save_hf)
    started_from = published_folder(config.checkpoint.load_hf, config.checkpoint.load)
    published = read_config(started_from) if started_from else {}
    architecture = trained_architecture(started_from) if started_from else None
    tensors = _whole(job, status)
    if job.world.rank == 0:
        hf.save_hf(
            folder,
            job.sizes,
            tensors,
            compute_dtype(config, job.world.device),
            token_ids=token_ids(tokenizer, published),
            architecture=architecture,
            published=published,
            beside=None if tokenizer is None else tokenizer.save_hf,
        )
    else:
        for _ in tensors:
            pass
    return folder


def _whole(job: Job, status: Status) -> Iterator[tuple[str, Tensor]]:
    masters = [shard.values for shard in job.sharding.master_shards]
    weights = collect_all(job.world, job.table, job.sharding, masters)
    buffers = collect_buffers(job.world, job.table, dict(job.model.named_buffers()), masters[0].dtype)
    for number, named in enumerate(chain(weights, buffers)):
        status("exporting", number, len(job.table), "tensors")
        yield named


def collect(
    world: World, spec: ParameterSpec, view: ParameterView | None, dtype: torch.dtype, *, full: bool
) -> Tensor | None:
    """Return the whole tensor on the CPU of rank 0, and None on other ranks. All ranks must collect the same parameter.

    The primary rank of each shard sends it. Which rank has which shard follows from the device mesh.

    Args:
        view: This rank's shard. None on ranks whose pipeline stage does not have the parameter.
        full: True at sharding stage 3.
    """
    grid = world.grid
    if grid.world_size == 1:
        assert view is not None
        return view.tensor.detach().cpu()
    owners = [rank for rank in range(grid.world_size) if is_primary(spec, grid, rank)]
    mine = None if view is None else view.tensor.detach().cpu().contiguous()
    if world.rank != 0:
        if world.rank in owners and mine is not None and mine.numel():
            host_messages.send(mine, 0)
        return None
    whole = torch.empty(spec.shape, dtype=dtype)
    for rank in owners:
        box = master_box(spec, grid, rank, full=full)
        if rank == 0:
            assert mine is not None
            whole[box.slices] = mine
        elif box.numel:
            piece = torch.empty(box.sizes, dtype=dtype)
            host_messages.receive(piece, rank)
            whole[box.slices] = piece
    return whole


def collect_all(
    world: World, table: Iterable[ParameterSpec], sharding: Sharding, tensors: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) one at a time on rank 0. Other ranks yield nothing but must exhaust the iterator.

    Args:
        table: Rows of the whole model. Its trainable parameters are collected in this order.
        tensors: A tensor for each of the sharding's master shards, such as its master weights.
    """
    mine = {view.spec.name: view for view in sharding.views(tensors)}
    dtype = next(iter(mine.values())).tensor.dtype
    for spec in table:
        if spec.trainable:
            whole = collect(world, spec, mine.get(spec.name), dtype, full=sharding.full)
            if whole is not None:
                yield spec.name, whole


def collect_buffers(
    world: World, table: Iterable[ParameterSpec], buffers: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) like ``collect_all``, whole on every rank of a stage. ``dtype`` is that of all buffers."""
    for spec in table:
        if spec.trainable:
            continue
        speaker = next(rank for rank in range(world.grid.world_size) if is_speaker(spec, world.grid, rank))
        if world.rank == speaker and speaker:
            host_messages.send(buffers[spec.name].cpu().contiguous(), 0)
        elif world.rank == 0:
            whole = torch.empty(spec.shape, dtype=dtype) if speaker else buffers[spec.name].cpu()
            if speaker:
                host_messages.receive(whole, speaker)
            yield spec.name, whole


BESIDE_WEIGHTS = 64 << 20  # bytes for what a folder contains besides weights: tokenizer, configuration, headers
_DIGITS = 12


@contextmanager
def exported(
    source: Place, cache: Path | None, *, dtype: torch.dtype | None = None, tokenizer: Tokenizer | None = None
) -> Iterator[Path]:
    """Provide a Hugging Face folder of a checkpoint of a decoder. See ``megapar_to_hf`` for the arguments.

    ``cache`` keeps the result; None writes a temporary folder, which is removed at the end. Raises CheckpointError if
    the folder cannot be written, before anything is written if the disk is too small.
    """
    checkpoint = at(source) if (at(source) / LAYOUT_FILE).is_file() else folders.find(source)
    saved = Saved(checkpoint)
    if spec_of(saved.sizes).kind != "moe":
        raise CheckpointError(
            f"{checkpoint} is {spec_of(saved.sizes).title}: it fills in words that are masked, and continues no text. "
            "Export it with megapar convert megapar-to-hf, and use it in transformers"
        )
    if cache is None:
        with tempfile.TemporaryDirectory(prefix="megapar-generate-") as place:
            yield _write(checkpoint, saved, Path(place) / "model", dtype, tokenizer)
        return
    folder = cache / _name(checkpoint, dtype, tokenizer)
    yield folder if folder.is_dir() else _write(checkpoint, saved, folder, dtype, tokenizer)


def _name(checkpoint: Location, dtype: torch.dtype | None, tokenizer: Tokenizer | None) -> str:
    """Return the folder's name, which differs for other weights (``layout.json`` has their hashes), dtype and ids."""
    state = hashlib.sha256((checkpoint / LAYOUT_FILE).content(INDEX_BYTES))
    state.update(f"{dtype}\0{'' if tokenizer is None else tokenizer.fingerprint()}".encode())
    root = Path(os.path.abspath(str(checkpoint.parent)))
    return f"{root.name}-{checkpoint.name}-{state.hexdigest()[:_DIGITS]}"


def _write(
    checkpoint: Location, saved: Saved, out: Path, dtype: torch.dtype | None, tokenizer: Tokenizer | None
) -> Path:
    root = checkpoint.parent
    if tokenizer is None and not has_tokenizer(root / BESIDE) and load_stored_tokenizer(root) is None:
        raise CheckpointError(f"{checkpoint} has no stored tokenizer. Pass that of the run with --tokenizer-model PATH")
    check_space(out, exported_bytes(saved, dtype) + ((root / BESIDE).list().get(CARRIED) or 0))
    megapar_to_hf(checkpoint, out, dtype=dtype, tokenizer=tokenizer)
    return out


def exported_bytes(saved: Saved, dtype: torch.dtype | None) -> int:
    """Return the size of the folder of a checkpoint, an upper bound; without ``dtype`` in fp32."""
    width = (dtype or torch.float32).itemsize
    return BESIDE_WEIGHTS + width * sum(row.numel for row in table_of(saved.sizes))


def check_space(path: Path, needed: int) -> None:
    """Raise CheckpointError if the disk of a path, which need not exist, has fewer than ``needed`` bytes free."""
    free = at(path).free_bytes()
    if free is not None and free < needed:
        raise CheckpointError(
            f"the export needs {needed / GIBIBYTE:.2f} GiB in {path.parent}, where {free / GIBIBYTE:.2f} GiB are free. "
            "Choose another disk with --hf-cache DIR or TMPDIR, or --dtype bf16"
        )
