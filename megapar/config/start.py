"""Start checks that need no torch: rendezvous variables, a device, another run's checkpoints, unintended defaults.

Only the check of the --save folder and of defaults give the same result on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megapar.checkpoints.format.names import (
    names_in,
    newest_name,
    parse_checkpoint_name,
    read_latest,
    saved_iterations,
    stored_scalars,
)
from megapar.config.draft import is_from_file
from megapar.errors import Complaint
from megapar.files.data_files import JSONL, PARQUET, TEXT, kind_of, split_name
from megapar.files.location import Location, at, same_place
from megapar.launch_environment import job_id, starts_before
from megapar.machine import no_device

_SLURM = "a Slurm step"
_TASKS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", _SLURM),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "an MPI job"),
)
"""Number of tasks and number of this task, as launchers set them that megapar does not use."""
_PTY = "SLURM_PTY_PORT"  # of srun --pty: a shell of one task, however many the step has


def check_start(environ: Mapping[str, str], values: Mapping[str, Any]) -> list[Complaint]:
    """Return complaints about a rank's environment and about the device of this machine."""
    device = [*_check_device(str(values.get("device"))), *_check_gpu(values)]
    return [*check_rank(environ), *_check_rendezvous(environ), *_check_alone(environ), *device]


def _check_device(kind: str) -> list[Complaint]:
    reason = no_device(kind)
    message = f"--device is {kind}, but {reason} on this machine."
    return [Complaint("device", message, "Set --device to cpu or auto.")] if reason else []


def _check_gpu(values: Mapping[str, Any]) -> list[Complaint]:
    """Complain about flags that need a GPU with --device auto on a machine without one; rows cover other devices."""
    backend, complaints = values.get("attention_backend", "auto"), []
    wanted = values.get("fp8") or values.get("apex") or backend != "auto"
    if not wanted or values.get("device") != "auto" or not (reason := no_device("cuda")):
        return []
    if values.get("fp8"):
        least = "8.9 or more" if values.get("fp8_recipe") == "tensorwise" else "9.0 (Hopper)"
        message = f"--fp8 needs an NVIDIA GPU of compute capability {least}, but {reason} on this machine."
        complaints.append(Complaint("device", message, "Leave --fp8 out, or emulate it with --device cpu."))
    if values.get("apex"):
        message = f"--apex needs an NVIDIA GPU, but {reason} on this machine."
        complaints.append(Complaint("device", message, "Leave --apex out."))
    if backend != "auto":
        message = f"--attention-backend {backend} needs an NVIDIA GPU, but {reason} on this machine."
        complaints.append(Complaint("device", message, "Leave --attention-backend out."))
    return complaints


def check_save(environ: Mapping[str, str], values: Mapping[str, Any]) -> list[Complaint]:
    """Complain if a run would overwrite another run's checkpoints; a restarted job may find its own."""
    load, save = values.get("load"), values.get("save")
    if save is None or same_place(load, save):
        return []
    saved = saved_iterations(save)
    unnamed_restart = starts_before(environ) and not job_id(environ)  # the owner cannot be determined
    if not saved or unnamed_restart:
        return []
    older = (at(save) / newest_name(save, number) for number in reversed(saved))
    known = filter(None, map(stored_scalars, chain((_best(at(save), saved[-1]),), older)))  # damaged ones give way
    if job_id(environ) and next(known, {}).get("job") == job_id(environ):
        return []
    message = f"--save {save} contains checkpoints of another run, up to iteration {saved[-1]}."
    return [Complaint("checkpoint", message, f"Resume from them with --load {save}, or choose another folder.")]


def _best(save: Location, last: int) -> Location:
    """Return the checkpoint that a run would continue from: the latest, else the newest of the last iteration."""
    try:
        name = (read_latest(save) or ("", 0))[0]
    except OSError:
        name = ""
    return save / (name if parse_checkpoint_name(name) and name in names_in(save) else newest_name(save, last))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def check_rank(environ: Mapping[str, str]) -> list[Complaint]:
    """Complain unless RANK and LOCAL_RANK are numbers, and RANK is below WORLD_SIZE. Other ranks may be right."""
    complaints = []
    fix = "Start the ranks with megapar launch or torchrun, which set them."
    for name in ("RANK", "LOCAL_RANK"):
        if not _is_number(environ.get(name) or "0"):
            complaints.append(Complaint("environment", f"{name} is {environ[name]!r}, not the number of a rank.", fix))
    size = environ.get("WORLD_SIZE") or "1"
    if not complaints and _is_number(size) and int(size) > 1 and int(environ.get("RANK") or 0) >= int(size):
        message = f"RANK is {environ['RANK']} and WORLD_SIZE is {size}, but ranks are 0 to {int(size) - 1}."
        complaints.append(Complaint("environment", message, fix))
    return complaints


def _check_rendezvous(environ: Mapping[str, str]) -> list[Complaint]:
    """Complain if the variables by which several ranks find each other are not set."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    size = environ.get("WORLD_SIZE") or "1"
    if not missing or size == "1" or not _is_number(size):  # the parser complains about one that is not a number
        return []
    verb = "is" if len(missing) == 1 else "are"
    message = f"WORLD_SIZE is {size}, but {' and '.join(missing)} {verb} not set, so ranks cannot find each other."
    fix = "Start the ranks with megapar launch or torchrun, which set them; for a single process, unset WORLD_SIZE."
    return [Complaint("environment", message, fix)]


def _check_alone(environ: Mapping[str, str]) -> list[Complaint]:
    """Complain if this process would train as the only rank although it is one of several."""
    if environ.get("WORLD_SIZE"):
        return []
    rank = environ.get("RANK") or "0"
    if _is_number(rank) and int(rank):
        message = f"RANK is {rank}, but WORLD_SIZE is not set, so this process would train alone."
        fix = "Start the ranks with megapar launch or torchrun, which set both; for a single process, unset RANK."
        return [Complaint("environment", message, fix)]
    for size, number, kind in _TASKS:
        tasks = environ.get(size, "")
        if environ.get("RANK") or not _is_number(tasks) or int(tasks) < 2 or (kind == _SLURM and _PTY in environ):
            continue
        which = f"task {environ.get(number, '?')} of {tasks} of {kind}"
        message = f"This is {which}, but RANK and WORLD_SIZE are not set, so each task would train the whole run alone."
        fix = f"Start one megapar launch per node (docs/launch.md); for a single process, unset {size}."
        return [Complaint("environment", message, fix)]
    return []


_RECOMPUTES = ("recompute_interval", "recompute_method", "adaptive_recompute_device_size")

LONG_RUN = 1000  # steps from which a run is worth saving; shorter runs are experiments

LARGE_MODEL = 10**9
"""Parameters of attention and MLP, 12 x layers x hidden size^2, from which training on 2 MB of text is a mistake."""


class DefaultNotes(NamedTuple):
    """Complaints about defaults that must be confirmed by setting the flag, and notes about others."""

    refused: tuple[Complaint, ...]
    notes: tuple[Complaint, ...]


def check_defaults(values: Mapping[str, Any], origins: Mapping[str, str]) -> DefaultNotes:
    """Return the findings for flat values, any of which may be missing, and their origins."""
    text = _built_in_text(values, origins)
    others = [*_own_tokenizer(values, origins), *_yarn(values), *_recompute(values, origins), *_saving(values)]
    refused = text is not None and _is_published(values, origins)
    notes = others if refused or text is None else [text, *others]
    return DefaultNotes((text,) if text is not None and refused else (), tuple(notes))


def _built_in_text(values: Mapping[str, Any], origins: Mapping[str, str]) -> Complaint | None:
    if origins.get("data_path", "default") != "default" or values.get("data_source") == "hf":
        return None
    message = "Without --data-path, a run trains on the built-in text: Python's documentation, about 2 MB."
    return Complaint("data-builtin", message, "Set --data-path, to builtin or mock if that is intended.")


def _own_tokenizer(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Complaint]:
    """Note that text of the user's own is encoded by a tokenizer that is not the published model's."""
    known = values.get("tokenizer_model") or values.get("load") or values.get("load_hf")
    kinds = {kind_of(Path(split_name(word)[1])) for word in values.get("data_path") or ()}  # "" may be indexed
    if known or not kinds & {*TEXT, *JSONL, PARQUET} or not _is_published(values, origins):
        return []
    message = "Without --tokenizer-model, a tokenizer is trained on the text, with --vocab-size ids at most."
    return [Complaint("tokenizer-trained", message, "Set --tokenizer-model to that of the model, if it has one.")]


def _yarn(values: Mapping[str, Any]) -> list[Complaint]:
    """Note that positions lie beyond those that YaRN stretches."""
    original, factor = values.get("original_max_position_embeddings"), values.get("rope_scaling_factor")
    length = values.get("seq_length") or 0
    if values.get("rope_scaling_type") != "yarn" or not original or not factor or original * factor >= length:
        return []
    message = f"yarn stretches {original:,} positions by {factor:g}, and --seq-length is {length:,}."
    return [Complaint("yarn-length", message, "Set --original-max-position-embeddings to those of the first training.")]


def _recompute(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Complaint]:
    asked = origins.get("recompute_granularity", "default") != "default"
    if not asked or values.get("recompute_granularity") != "full" or any(values.get(name) for name in _RECOMPUTES):
        return []
    message = "--recompute-granularity full is what a recomputed unit is, and nothing is recomputed."
    return [Complaint("recompute-nothing", message, "Add --recompute-interval 1, or leave it out.")]


def _is_published(values: Mapping[str, Any], origins: Mapping[str, str]) -> bool:
    """Return True for a configuration file that sets world_size, or a model too large for the built-in text."""
    ranks = values.get("world_size") or 1
    matrices = 12 * (values.get("num_layers") or 0) * (values.get("hidden_size") or 0) ** 2
    return (is_from_file(origins.get("world_size")) and ranks > 1) or matrices >= LARGE_MODEL


def _saving(values: Mapping[str, Any]) -> list[Complaint]:
    steps = values.get("train_iters") or 0
    if steps < LONG_RUN:
        return []
    if not values.get("save"):
        result = "Nothing is saved."
        if values.get("save_hf"):
            result = "--save-hf stores only the model, from which a run can start but not continue."
        return [Complaint("no-save", f"{steps:,} steps without --save: {result}", "Set --save and --save-interval.")]
    before_the_end = ("save_interval", "save_interval_minutes", "exit_interval", "exit_duration_minutes")
    if not any(values.get(name) for name in before_the_end):
        message = f"--save {values['save']} without --save-interval: the {steps:,} steps are only saved at the end."
        return [Complaint("no-save-interval", message, "Set --save-interval or --save-interval-minutes.")]
    return []
