"""The identity of a run, as its checkpoints record it, and its differences from a run that resumes. No torch.

Another architecture, optimizer or tokenizer is another model. Other data is refused unless --override-data names it;
layout, ranks, versions, code and other flags are reported.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import megapar
from megapar.arguments import FLAGS, Config
from megapar.config.stored import stored_scalars
from megapar.data.tokenizers.ids import Facts, known_facts, same_ids
from megapar.errors import Complaint, DataError
from megapar.training.checkpoints.data_facts import DataFacts

VERSION = 1
OPTIMIZER = "adamw"
RECORD = "identity"  # among a checkpoint's scalars
_GROUPS = (
    *("model", "moe", "ampipe", "training", "optimizer", "data"),
    *("parallel", "sharding", "pipeline", "recompute"),
)
# Compared elsewhere, or of one start only.
_ELSEWHERE = ("seed", "seq_length", "split", "override_data", "override_opt_param_scheduler")
_OF_A_START = ("train_iters", "eval_interval", "eval_iters", "distributed_timeout_minutes")
READ_AT_ONCE = 16 << 20  # bytes of data, which --validate-only reads where the cache does not know them
_TOLD = 12  # differences of flags


@dataclass(frozen=True)
class DataPhase:
    """A stretch of a run with one kind of data. start: its first sample. lanes: see data.course.Phase."""

    start: int
    lanes: tuple[str, ...]
    data: DataFacts

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"start": self.start, "lanes": list(self.lanes), **self.data.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataPhase:
        """Raises ValueError, KeyError or TypeError for what ``to_json`` never wrote."""
        start, lanes, data = value["start"], tuple(map(str, value["lanes"])), DataFacts.from_json(value)
        if not isinstance(start, int) or start < 0 or len(lanes) != len(data.sources):
            raise ValueError(f"a phase from {start!r} on with {len(lanes)} lanes")
        return cls(start, lanes, data)


@dataclass(frozen=True)
class Identity:
    """The record of its run in a checkpoint.

    tokenizer: see data.ids; None without text. phases: which data was read from which sample on; the last one is the
    current one. made_by: versions, code, ranks. flags: what else may change numbers, by name.
    """

    optimizer: str
    tokenizer: Facts | None
    phases: tuple[DataPhase, ...]
    made_by: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> DataFacts:
        """The data that is read now."""
        return self.phases[-1].data

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint's scalars."""
        return {
            "version": VERSION,
            "optimizer": self.optimizer,
            "tokenizer": self.tokenizer,
            "phases": [phase.to_json() for phase in self.phases],
            "made_by": dict(self.made_by),
            "flags": dict(self.flags),
        }

    @classmethod
    def from_json(cls, value: Any) -> Identity | None:
        """None for what ``to_json`` did not write, as checkpoints of before have nothing."""
        try:
            phases = tuple(DataPhase.from_json(one) for one in value["phases"])
            starts = [phase.start for phase in phases]
            tokenizer, made_by, flags = value["tokenizer"], dict(value["made_by"]), dict(value["flags"])
            sound = value["version"] == VERSION and phases and starts == sorted(starts) and starts[0] == 0
            if not sound or not isinstance(tokenizer, (dict, type(None))):
                return None
            return cls(str(value["optimizer"]), tokenizer, phases, made_by, flags)
        except (KeyError, TypeError, ValueError):
            return None


@lru_cache(maxsize=1)
def code_hash() -> str:
    """12 hexadecimal digits over the package's own source files."""
    root, state = Path(megapar.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        state.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:12]


def made_by(ranks: int, nodes: int) -> dict[str, Any]:
    """Versions, code and ranks that make the checkpoints of this process's run."""
    versions = {"megapar": megapar.__version__, "torch": _version("torch"), "python": platform.python_version()}
    return {**versions, "code": code_hash(), "ranks": ranks, "nodes": nodes}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def flags_of(config: Config) -> dict[str, Any]:
    """The values of all flags that say what is trained and how; without paths and what each start chooses."""
    found, values = {}, config.values()
    for flag in FLAGS.values():
        left_out = flag.meta or flag.path or flag.name in (*_ELSEWHERE, *_OF_A_START)
        if flag.group in _GROUPS and config.kind in flag.models and not left_out:
            value = values[flag.name]
            found[flag.name] = list(value) if isinstance(value, tuple) else value
    return found


def refused(
    there: Identity, optimizer: str, tokenizer: Facts | None, data: DataFacts | None, config: Config, where: str
) -> list[Complaint]:
    """What of a run is not that of the checkpoint it goes on from, as complaints; what --override-data names is none.

    tokenizer: None where it is not known. data: None where it is not compared. where: begins messages.
    """
    found = []
    if there.optimizer != optimizer:
        message = f"{where} is of another optimizer: {there.optimizer} there and {optimizer} here."
        found.append(
            Complaint("checkpoint-optimizer", message, "Its moments mean nothing here; --finetune starts over.")
        )
    if there.tokenizer is not None and tokenizer is not None and not same_ids(there.tokenizer, tokenizer):
        prints = _shown(there.tokenizer.get("fingerprint")), tokenizer["fingerprint"]
        message = f"{where} was trained on the ids of another tokenizer: {prints[0]} there and {prints[1]} here."
        fix = "Leave --tokenizer-model out to have the one that is kept beside the checkpoints, or give that one."
        found.append(Complaint("checkpoint-tokenizer", message, fix))
    apart = [] if data is None else there.data.apart(data)
    open_ = [one for one in apart if one.field not in config.data.override_data]
    if open_:
        message = f"{where} was trained on other data: {'; '.join(one.said for one in open_)}."
        names = ",".join(dict.fromkeys((*config.data.override_data, *(one.field for one in open_))))
        fix = f"Give what it was trained with, or --override-data {names} to go on with what is given now."
        found.append(Complaint("checkpoint-data", message, fix))
    return found


def told(there: Identity, here: Identity) -> str:
    """How a run that goes on is made otherwise than its checkpoint, in one line; "" where it is not."""
    changed = [
        f"{name} {_shown(there.made_by[name])} -> {value}"
        for name, value in here.made_by.items()
        if name in there.made_by and there.made_by[name] != value
    ]
    flags = [
        f"{FLAGS[name].spelling} {_shown(there.flags[name])} -> {_shown(value)}"
        for name, value in here.flags.items()
        if name in there.flags and there.flags[name] != value
    ]
    more = [f"and {len(flags) - _TOLD} flags more"] if len(flags) > _TOLD else []
    return ", ".join([*changed, *flags[:_TOLD], *more])


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{','.join(map(str, value)) or 'none':.60}"
    return "none" if value is None else f"{value!s:.60}"


def another_run(config: Config, folder: Path) -> tuple[list[Complaint], str]:
    """Where a configuration is not of the run that saved ``folder``, and what could not be compared, as a line.

    The question alone reads little data: what the cache knows is compared. A start reads what it would read anyway.
    """
    scalars = stored_scalars(folder)
    there, iteration = Identity.from_json(scalars.get(RECORD)), scalars.get("iteration")
    if there is None:
        return [], ""
    path = config.data.tokenizer_model
    tokenizer = None if path is None else known_facts(path)
    data = None
    try:
        if not isinstance(iteration, int) or config.training.train_iters > iteration:
            data = DataFacts.of(config, may_read=not config.runtime.validate_only)
            data = DataFacts.of(config) if data.unread <= READ_AT_ONCE else data
    except DataError as error:
        return [Complaint("data", f"{error}.")], ""
    where = f"--load {config.checkpoint.load}: {folder.name}"
    complaints = refused(there, OPTIMIZER, tokenizer, data, config, where)
    if data is None or not data.unread:
        return complaints, ""
    return complaints, f"data: not compared with that of {folder.name}, {data.unread / 1e9:.3g} GB to be read\n"
