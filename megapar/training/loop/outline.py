"""The part of --validate-only that needs the model: its parameters, stages and buckets, and the weights that it loads.

Does not import torch, because the entry scripts import this module before the configuration is accepted.
"""

from __future__ import annotations

import os

from megapar.arguments import Config
from megapar.checkpoints.format.names import stored_facts, stored_scalars, stored_schedule
from megapar.checkpoints.ownership.identity import another_run, match_folder, match_model
from megapar.config.published import architecture_of, read_config
from megapar.core.units import MEGABYTE, billions
from megapar.errors import CheckpointError, Complaint, ConfigError
from megapar.files.uri import is_stored
from megapar.launch_environment import starts_before
from megapar.model.facts import differences
from megapar.model.published_tensors import PublishedTensors
from megapar.model.sizes import ModelSizes
from megapar.model.spec import parameter_counts, table_of
from megapar.training.building.device_choices import assumed_node, dispatch_choice, kind_of_run
from megapar.training.building.partition import make_segments, pipeline_outline
from megapar.training.building.rates import width_lines, with_rates
from megapar.training.step.schedules import another_schedule, schedule_of


def outline(config: Config) -> str:
    """Describe the model for --validate-only: parameters, stages, buckets. Raises ConfigError for a bad checkpoint."""
    sizes = config.model
    _check_published(config, sizes)
    settled = config
    if config.runtime.validate_only:
        from megapar.training.building.epochs import with_known_epochs  # imports what reads data

        settled = with_known_epochs(config)
    not_compared = _check_saved(settled, sizes)
    segments = make_segments(config, sizes)
    shown = segments if len(segments) <= 12 else [*segments[:6], *segments[-5:]]
    lines = [f"  {s.bytes / MEGABYTE:.3g} MB: {len(s.names)} parameters of {s.span}" for s in shown]
    if len(shown) < len(segments):
        lines.insert(6, f"  ... {len(segments) - len(shown)} more")
    segmented = "\n".join([f"segments: {len(segments)}", *lines]) + "\n"
    table = with_rates(config, table_of(sizes))
    widths = "".join(f"{line}\n" for line in width_lines(config, table))
    counts = "".join(f"{note}\n" for note in settled.notes[len(config.notes) :]) + _counts(sizes)
    return counts + widths + pipeline_outline(config, sizes) + _dispatch(config) + segmented + not_compared


def _check_published(config: Config, sizes: ModelSizes) -> None:
    """Refuse weights that are damaged or another model's, by their headers."""
    folder = config.checkpoint.load_hf
    if folder is None or config.runtime.rules_only:
        return
    try:
        match_folder(PublishedTensors(folder), table_of(sizes), architecture_of(read_config(folder)))
    except CheckpointError as error:
        raise ConfigError([Complaint("load-hf", f"--load-hf {error}.")]) from error


def _check_saved(config: Config, sizes: ModelSizes) -> str:
    """Refuse a checkpoint of another model, schedule, tokenizer or data; return a line on data not compared, or ""."""
    saved = config.checkpoint
    if saved.load is None or config.runtime.rules_only or starts_before(os.environ):  # a restart goes on from its own
        return ""
    if is_stored(saved.load):
        return f"--load {saved.load} is compared when the run starts: nothing is read from a store here\n"
    if (stored := stored_facts(saved.load, saved.ckpt_step)) is None:
        return ""
    folder, facts = stored
    weights_only = saved.finetune or stored_schedule(folder) is None
    complaints = []
    if changes := differences(facts, match_model(facts, sizes.facts(), weights_only=weights_only).facts):
        message = f"--load {saved.load}: {folder.name} is a checkpoint of another model: {changes}."
        fix = "Pass the flags that it was trained with, or the folder of another run."
        complaints.append(Complaint("checkpoint-model", message, fix))
    # Of epochs, they may be known with the data alone; then the run compares the schedules.
    steps_known = not config.training.train_epochs or config.origins["train_iters"] == "derived"
    trained = None if weights_only or saved.no_load_optim or not steps_known else stored_schedule(folder)
    if trained is not None and not config.optimizer.override_opt_param_scheduler:
        steps = stored_scalars(folder).get("iteration")
        other = another_schedule(trained, schedule_of(config), steps if isinstance(steps, int) else 0)
        if other is not None:
            message = f"--load {saved.load}: {folder.name} was trained on another learning-rate schedule: {other[0]}."
            complaints.append(Complaint("checkpoint-schedule", message, other[1]))
    others, not_compared = ([], "") if weights_only else another_run(config, folder)
    if complaints or others:
        raise ConfigError([*complaints, *others])
    return not_compared


def _dispatch(config: Config) -> str:
    """Return the dispatch of experts over ep, or "". The device of the run may not be here, so the usual one counts."""
    if config.grid.ep == 1:
        return ""
    device = config.runtime.device
    kind = kind_of_run(config, "cuda" if device == "auto" else device, "")
    dtype = kind.default_dtype if config.training.dtype == "auto" else config.training.dtype
    chosen = dispatch_choice(config, kind, dtype, assumed_node(kind, config.grid.world_size))
    return f"dispatch of experts: {chosen.describe()}\n"


def _counts(sizes: ModelSizes) -> str:
    total, active = parameter_counts(sizes)
    of_a_token = "" if active == total else f", {billions(active)} active per token"
    every = sum(row.numel for row in table_of(sizes) if row.trainable)
    mtp = "" if every == total else f"\nmulti-token prediction: {billions(every - total)} more, in training only"
    return f"parameters: {billions(total)}{of_a_token}{mtp}\n"
