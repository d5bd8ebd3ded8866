"""Factories for the parts of a run, from its flags: data, schedules, slices, the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from megapar.arguments import Config
from megapar.config.draft import is_given
from megapar.core.comm.axis import Axis
from megapar.core.comm.world import World
from megapar.core.context_parallel.positions import SequenceLayout, choose_layout
from megapar.core.device.base import Device
from megapar.core.optimizer.loss_scale import LossScale
from megapar.data import corpus
from megapar.data.batches import Collate, Loader, pinned
from megapar.data.context_parallel_batch import context_parallel_collate
from megapar.data.corpus import Corpus
from megapar.data.own_data import CheckedPieces, OwnData
from megapar.data.sample_maker import Packing
from megapar.data.sampling.skipping import Range, Skipping
from megapar.data.tasks.build import TaskData
from megapar.data.text.source import PYTHON
from megapar.data.unpadded_batch import unpadded_collate
from megapar.errors import Complaint, ConfigError
from megapar.model.spec import spec_of
from megapar.moe.slicing import Slicing
from megapar.training.building.attention_backend import skips_padding
from megapar.training.building.device_figures import kind_of_run
from megapar.training.building.expert_dispatch import DispatchChoice, dispatch_choice
from megapar.training.step.bad_steps import BadStepPolicy, SpikeDetector
from megapar.training.step.dtypes import DTYPES, compute_dtype
from megapar.training.step.objective import Objective


def experts_dispatch(config: Config, device: Device) -> DispatchChoice:
    """Return the dispatch of experts that this rank chooses. Raises ConfigError if the requested one does not fit."""
    computed = compute_dtype(config, device)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == computed)
    return dispatch_choice(config, kind_of_run(config, device.type, device.name), dtype)


def experts_axis(config: Config, world: World) -> Axis:
    """Return the axis ep, divided by node if the dispatch of experts is by node. Collective."""
    chosen = experts_dispatch(config, world.device)
    if not chosen.node_ranks:
        return replace(world.axis("ep"), nodes=None)
    if world.axis("ep").nodes is None:
        world.make_nodes(chosen.node_ranks)
    return world.axis("ep")


def timeout(config: Config) -> timedelta:
    """Return the time that ranks wait for each other in a collective."""
    return timedelta(minutes=config.parallel.distributed_timeout_minutes)


def make_corpus(config: Config) -> Corpus:
    """Return samples, tokenizer and held-out samples. Needs no process group. Raises DataError or ConfigError."""
    data = config.data
    return corpus.build(
        config.kind,
        data_path=data.data_path,
        eval_data_path=data.eval_data_path or (None if config.training.eval_interval else ()),
        split=data.split,
        tokenizer_model=data.tokenizer_model,
        vocab_size=config.model.vocab_size,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        mlm_probability=data.mlm_probability,
        packing=Packing(data.packing, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss),
        skip_bad=data.on_bad_record == "skip",
        hf_dataset=data.hf_dataset,
        tasks=_task_data(config),
        text_field=data.text_field,
    )


def _task_data(config: Config) -> TaskData | None:
    """Return the files and settings of ERNIE 3.0's pretraining tasks, or None for other models."""
    if not config.model.mixes_tasks:
        return None
    data = config.data
    return TaskData(
        data.ernie_tasks,
        data.phrase_file,
        data.entity_file,
        data.triples_file,
        data.sentence_reorder_pieces,
        data.mlm_probability,
    )


def make_layout(config: Config) -> SequenceLayout:
    """Return how the ranks of cp share a sequence."""
    parallel, slicing = config.parallel, make_slicing(config)
    return choose_layout(
        parallel.context_parallel_algo,
        parallel.cp_degree,
        causal=config.model.causal,
        length=config.model.seq_length,
        slices=slicing.degree,
        balanced=slicing.balanced,
        parts=parallel.mp_degree if parallel.sequence_parallel else 1,
    )


def make_collate(config: Config, world: World, corpus: Corpus) -> Collate:
    """Return the function that makes pinned micro-batches of this rank's positions from whole samples."""
    own = context_parallel_collate(corpus.collate, make_layout(config), world.axis("cp").rank)
    if skips_padding(config):
        own = unpadded_collate(own, config.parallel.mp_degree if config.parallel.sequence_parallel else 1)
    return pinned(own, world.device.pin)


def make_loader(config: Config, corpus: Corpus, collate: Collate, data: Axis, skipped: Sequence[Range]) -> Loader:
    """Return the loader of this rank's micro-batches, without skipped samples.

    Each rank of ``data`` reads its own part of every global batch.
    """
    return Loader(
        Skipping(corpus.train, skipped) if skipped else corpus.train,
        collate,
        micro_batch_size=config.training.micro_batch_size,
        data_rank=data.rank,
        data_ranks=data.size,
    )


def make_objective(config: Config) -> Objective:
    """Return the training objective: the weights of the loss terms."""
    weights = config.model.loss_weights(config.values())
    if not spec_of(config.model).has_experts:
        return Objective(weights)
    moe = config.moe
    return Objective(
        weights,
        moe.moe_aux_loss_coeff,
        moe.moe_z_loss_coeff,
        moe.moe_seq_aux_loss_coeff,
        moe.moe_orthogonal_loss_coeff,
    )


def make_slicing(config: Config, degree: int | None = None) -> Slicing:
    """Return how AMPipe slices layers, and how experts' rows are split. ``degree`` overrides --ampipe-degree.

    With --ampipe-degree auto a model starts without slices.
    """
    ampipe = config.ampipe
    degree = max(1, ampipe.ampipe_degree if degree is None else degree)
    return Slicing(
        degree=degree,
        balanced=ampipe.ampipe_slicing == "balanced",
        capacity=ampipe.ampipe_capacity,
        cross_layer=ampipe.ampipe_cross_layer and degree > 1,
        overlap_mp=ampipe.ampipe_tp_sp_comm_overlap,
        # The flag counts the pieces of all slices together, so each slice has its share of them.
        expert_pieces=ampipe.pipe_experts_multi_data // degree if ampipe.use_pipe_experts else 0,
        chained=ampipe.pipe_experts_multi_stream,
    )


def make_loss_scale(config: Config, device: Device) -> LossScale | None:
    """Return the dynamic loss scaling if the compute dtype is fp16, else None."""
    training = config.training
    if compute_dtype(config, device) != torch.float16:
        return None
    return LossScale(
        value=training.initial_loss_scale,
        minimum=training.min_loss_scale,
        factor=training.loss_scale_factor,
        window=training.loss_scale_window,
        hysteresis=training.hysteresis,
    )


def make_bad_step_policy(config: Config) -> BadStepPolicy:
    """Return the policy for steps with non-finite gradients or spikes."""
    folder = Path(config.checkpoint.save) if config.checkpoint.save else None
    reliability = config.reliability
    return BadStepPolicy(reliability.bad_step_limit, SpikeDetector(reliability.spike_sigmas), folder)


def with_own_data(config: Config, data: OwnData) -> Config:
    """Return the configuration of a run on ``data``, whose name replaces ``--data-path``.

    Raises ConfigError if flags ask for other data, or for an evaluation without held-out sequences.
    """
    complaints = []
    if config.kind != "moe":
        message = "Own data is token ids for a decoder, and this is the configuration of ERNIE."
        complaints.append(Complaint("own-data-kind", message, 'Parse the flags with parse("moe", ...).'))
    named = [name for name in ("data_path", "eval_data_path", "hf_dataset") if is_given(config.origins.get(name))]
    if named:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in named)
        complaints.append(Complaint("own-data-twice", f"Both own data and {flags} are given.", "Keep one of them."))
    if data.heldout is None and config.training.eval_interval:
        message = f"--eval-interval {config.training.eval_interval}, but the own data has no held-out sequences."
        complaints.append(Complaint("own-data-heldout", message, "Pass heldout, or set --eval-interval 0."))
    if complaints:
        raise ConfigError(complaints)
    return replace(config, data=replace(config.data, data_path=(f"{PYTHON}{data.name}",)))


def make_own_corpus(config: Config, data: OwnData) -> Corpus:
    """Return the samples of ``data``. The tokenizer is that of ``--tokenizer-model``, if it is set.

    Raises DataError or ConfigError.
    """
    sizes = config.model.seq_length, config.model.vocab_size
    flags = config.data
    return corpus.of_pieces(
        CheckedPieces(data.train, data.name, *sizes),
        None if data.heldout is None else CheckedPieces(data.heldout, data.name, *sizes),
        name=data.name,
        tokenizer_model=flags.tokenizer_model,
        vocab_size=config.model.vocab_size,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        packing=Packing(True, flags.reset_position_ids, flags.reset_attention_mask, flags.eod_mask_loss),
    )
