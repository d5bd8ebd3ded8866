"""The identity of a run, as its checkpoints record it, and its differences from a run that resumes.

Another architecture, optimizer or tokenizer is another model; a checkpoint may lack a block of the model, or have one
more. Other data is refused unless --override-data names it. Changes of layout, ranks, versions, code and other flags
are reported.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import megapar
from megapar.arguments import FLAGS, Config
from megapar.checkpoints.format.names import stored_scalars
from megapar.checkpoints.ownership.data_facts import DataFacts
from megapar.checkpoints.ownership.data_history import DataPhase, DataPlan, off_plan, past_differences, planned_data
from megapar.core.optimizer.states import states_of
from megapar.data.sampling.skipping import effective, merged, parse_range, sample_at
from megapar.data.tokenizers.ids import Facts, known_facts, same_ids
from megapar.errors import Complaint, DataError
from megapar.files.data_files import PARAGRAPH
from megapar.files.location import Location
from megapar.model.decoder.sizes import DENSE_BLOCK
from megapar.model.ernie.table import SOP
from megapar.model.parameter import ParameterSpec
from megapar.model.published_tensors import PublishedTensors
from megapar.schema.published import PublishedArchitecture

VERSION = 1
RECORD = "identity"  # among a checkpoint's scalars
HELDOUT_ORDER = 2  # of held-out samples: 1 was that of the corpus, 2 is samples.HeldOutOrder
# fmt: off
_GROUPS = (
    "model", "moe", "ampipe", "training", "optimizer", "data", "parallel", "sharding", "pipeline", "recompute",
)
_LEFT_OUT = (
    "seed", "seq_length", "split", "data_phases", "override_data", "override_opt_param_scheduler",  # compared elsewhere
    "train_iters", "eval_interval", "eval_iters", "eval_tasks", "distributed_timeout_minutes",  # of one start only
    "moe_dispatch", "ranks_per_node", "moe_rebalance_interval",
)
# fmt: on
READ_AT_ONCE = 16 << 20  # bytes of data that --validate-only reads at most to find fingerprints missing in the cache
_SHOWN_FLAGS = 12  # maximum number of changed flags in a message


@dataclass(frozen=True)
class Identity:
    """The record of a run in its checkpoints.

    Attributes:
        optimizer: Name of the optimizer. adamw for a checkpoint that does not record it.
        tokenizer: Facts of the tokenizer, see ``data.tokenizers.ids``. None without text.
        phases: The data that was read from each sample on. The last phase is the current one.
        made_by: Versions, code and number of ranks.
        flags: The other flags that may change results, by name.
        heldout_order: Order of the held-out samples, see HELDOUT_ORDER. 1 for a checkpoint that does not record it.
    """

    optimizer: str
    tokenizer: Facts | None
    phases: tuple[DataPhase, ...]
    made_by: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    heldout_order: int = HELDOUT_ORDER

    @property
    def data(self) -> DataFacts:
        """The current data; of planned phases, the sources of all of them."""
        first = max(number for number, phase in enumerate(self.phases) if not phase.planned)
        planned = [source for phase in self.phases[first:] for source in phase.data.sources]
        own = self.phases[first].data
        named = {source.name: source for source in planned}
        return own if first == len(self.phases) - 1 else replace(own, sources=tuple(named.values()))

    @property
    def document_per(self) -> str:
        """Meaning of a document in its text; for a checkpoint that does not record it, as it was then."""
        return str(self.flags.get("document_per", PARAGRAPH))

    def to_json(self) -> dict[str, Any]:
        """Return the identity as JSON values for a checkpoint's scalars."""
        return {
            "version": VERSION,
            "optimizer": self.optimizer,
            "tokenizer": self.tokenizer,
            "phases": [phase.to_json() for phase in self.phases],
            "made_by": dict(self.made_by),
            "flags": dict(self.flags),
            "heldout_order": self.heldout_order,
        }

    @classmethod
    def from_json(cls, value: Any) -> Identity | None:
        """Return the identity from the output of ``to_json``, or None for anything else, as in older checkpoints."""
        try:
            phases = tuple(DataPhase.from_json(phase) for phase in value["phases"])
            starts = [phase.start for phase in phases]
            tokenizer, made_by, flags = value["tokenizer"], dict(value["made_by"]), dict(value["flags"])
            order = value.get("heldout_order", 1)
            sound = value["version"] == VERSION and phases and starts == sorted(starts) and starts[0] == 0
            sound = sound and not phases[0].planned
            if not sound or not isinstance(tokenizer, (dict, type(None))) or not isinstance(order, int):
                return None
            return cls(str(value.get("optimizer", "adamw")), tokenizer, phases, made_by, flags, order)
        except (KeyError, TypeError, ValueError):
            return None


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Return 12 hexadecimal digits of a hash over the package's source files."""
    root, state = Path(megapar.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        state.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:12]


def made_by(ranks: int, nodes: int) -> dict[str, Any]:
    """Return the versions, code hash and number of ranks and nodes of this process's run."""
    versions = {"megapar": megapar.__version__, "torch": _version("torch"), "python": platform.python_version()}
    return {**versions, "code": code_hash(), "ranks": ranks, "nodes": nodes}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def flags_of(config: Config) -> dict[str, Any]:
    """Return the values of all flags that affect training, except paths and the flags of a single start."""
    flags, values = {}, config.values()
    for flag in FLAGS.values():
        left_out = flag.meta or flag.path or flag.name in _LEFT_OUT
        if flag.group in _GROUPS and config.kind in flag.models and not left_out:
            value = values[flag.name]
            flags[flag.name] = list(value) if isinstance(value, tuple) else value
    return flags


def refused(
    there: Identity, tokenizer: Facts | None, plan: DataPlan | None, config: Config, where: str, now: int = 0
) -> list[Complaint]:
    """Return complaints about the differences between a run and its checkpoint, except those in --override-data.

    Args:
        tokenizer: Facts of the run's tokenizer. None if they are not known.
        plan: Data of the run. None if it is not compared.
        where: Beginning of the messages.
        now: The sample that the run continues with.
    """
    complaints = []
    optimizer = config.optimizer
    other = another_optimizer(
        optimizer_flags(there.optimizer, there.flags.get("sgd_momentum")),
        optimizer_flags(optimizer.optimizer, optimizer.sgd_momentum),
    )
    if other is not None and not config.checkpoint.no_load_optim:
        complaints.append(Complaint("checkpoint-optimizer", f"{where} {other[0]}.", other[1]))
    if there.tokenizer is not None and tokenizer is not None and not same_ids(there.tokenizer, tokenizer):
        prints = _shown(there.tokenizer.get("fingerprint")), tokenizer["fingerprint"]
        message = f"{where} was trained on the ids of another tokenizer: {prints[0]} there and {prints[1]} here."
        fix = "Leave --tokenizer-model out to use the tokenizer that is saved with the checkpoints, or pass that one."
        complaints.append(Complaint("checkpoint-tokenizer", message, fix))
    differences = [] if plan is None else past_differences(there.phases, plan, now)
    open_ = [difference for difference in differences if difference.field not in config.data.override_data]
    if open_:
        message = f"{where} was trained on other data: {'; '.join(difference.text for difference in open_)}."
        names = ",".join(dict.fromkeys((*config.data.override_data, *(difference.field for difference in open_))))
        fix = f"Pass the data that it was trained with, or --override-data {names} to continue with the given data."
        per, here = there.document_per, config.data.document_per
        if per != here and any(difference.field == "sources" for difference in open_):
            fix += f" Text was read with --document-per {per} there, and with {here} here."
        complaints.append(Complaint("checkpoint-data", message, fix))
    return complaints


def optimizer_flags(optimizer: str, momentum: object) -> str:
    """Return the flags that choose an optimizer with these states: SGD without momentum has none."""
    return "--optimizer sgd --sgd-momentum 0" if optimizer == "sgd" and not momentum else f"--optimizer {optimizer}"


def flags_of_states(states: Collection[str]) -> str:
    """Return the flags that choose the optimizer of stored states, or their names if no optimizer has them."""
    for optimizer, momentum in (("adamw", 0.0), ("muon", 0.0), ("sgd", 0.9), ("sgd", 0.0)):
        if set(states) == set(states_of(optimizer, momentum)):
            return optimizer_flags(optimizer, momentum)
    return ", ".join(sorted(states))


def another_optimizer(there: str, here: str) -> tuple[str, str] | None:
    """Return (the difference of two optimizers, what to do), given their flags. None if they are equal."""
    if there == here:
        return None
    fix = f"Pass {there}, --no-load-optim to continue with new optimizer state, or --finetune to start over."
    return f"is of another optimizer: {there} there and {here} here", fix


def changes(there: Identity, here: Identity) -> str:
    """Describe the changes of versions, code, ranks and flags since a checkpoint in one line, "" without any."""
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
    more = [f"and {len(flags) - _SHOWN_FLAGS} more flags"] if len(flags) > _SHOWN_FLAGS else []
    return ", ".join([*changed, *flags[:_SHOWN_FLAGS], *more])


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{','.join(map(str, value)) or 'none':.60}"
    return "none" if value is None else f"{value!s:.60}"


def another_run(config: Config, folder: Location) -> tuple[list[Complaint], str]:
    """Compare a configuration with the run that saved ``folder``.

    With --validate-only, little data is read: fingerprints come from the cache. A start reads what it needs anyway.

    Returns:
        The complaints, and a line about the data that could not be compared, or "".
    """
    scalars = stored_scalars(folder)
    saved, iteration = Identity.from_json(scalars.get(RECORD)), scalars.get("iteration")
    if saved is None:
        return [], ""
    path = config.data.tokenizer_model
    tokenizer = None if path is None else known_facts(path)
    where, consumed = f"--load {config.checkpoint.load}: {folder.name}", scalars.get("consumed_samples", 0)
    plan: DataPlan | None = None
    unread, complaints = 0, list[Complaint]()
    try:
        ranges = [(int(first), int(last)) for first, last in scalars.get("skip_samples", [])]
        skipped = effective(merged(map(parse_range, config.reliability.skip_samples)), ranges, int(consumed))
    except (TypeError, ValueError):
        return [], ""  # no run wrote these scalars; the start says so
    try:
        if not isinstance(iteration, int) or config.training.train_iters > iteration:
            unread = DataFacts.of(config, may_read=not config.runtime.validate_only).unread
            plan = planned_data(config, skipped, may_read=unread <= READ_AT_ONCE or not config.runtime.validate_only)
            complaints = off_plan(config, iteration, consumed, where) if isinstance(iteration, int) else []
    except DataError as error:
        return [Complaint("data", f"{error}.")], ""
    complaints += refused(saved, tokenizer, plan, config, where, sample_at(consumed, skipped))
    if unread <= READ_AT_ONCE:
        return complaints, ""
    return complaints, f"data: not compared with that of {folder.name}, {unread / 1e9:.3g} GB would be read\n"


@dataclass(frozen=True)
class OptionalBlock:
    """A part of a model that its checkpoint may lack.

    Attributes:
        fact: The fact of the model that is true if it has the block.
        prefixes: Prefixes of its parameters' names.
        kind: The fact that says which of several blocks it is; "" if there is one.
        without: Value of that fact in a model without the block.
    """

    name: str
    fact: str
    prefixes: tuple[str, ...]
    kind: str = ""
    without: str = ""


SENTENCE_ORDER = OptionalBlock("sentence-order head", "sop", SOP)
MTP = OptionalBlock("multi-token prediction block", "mtp_depth", ("mtp.",), "mtp_block", DENSE_BLOCK)
BLOCKS = (SENTENCE_ORDER, MTP)


@dataclass(frozen=True)
class ModelMatch:
    """The comparison of a model with a checkpoint.

    Attributes:
        facts: Facts that the checkpoint must have.
        initial: Blocks that the checkpoint lacks. They keep their initial weights.
        dropped: Blocks that only the checkpoint has.
    """

    facts: dict[str, Any]
    initial: tuple[OptionalBlock, ...]
    dropped: tuple[OptionalBlock, ...]


def match_model(stored: Mapping[str, Any], expected: Mapping[str, Any], *, weights_only: bool) -> ModelMatch:
    """Return the facts that a checkpoint must have to fit a model.

    With rotary positions, which have no tensor, the maximum sample length may differ. ``weights_only``, as with
    --finetune or a converted model: a head or block that only one side has is initialized or dropped.
    """
    facts = dict(expected)
    initial: list[OptionalBlock] = []
    dropped: list[OptionalBlock] = []
    if facts.get("position_embedding_type") == "rope":
        facts["max_position_embeddings"] = stored.get("max_position_embeddings")
    for block in BLOCKS if weights_only else ():
        there, here = stored.get(block.fact), facts.get(block.fact)
        if there is not None and here is not None and bool(there) != bool(here):
            (initial if here else dropped).append(block)
            facts[block.fact] = there
            if block.kind:
                facts[block.kind] = stored.get(block.kind, block.without)
    return ModelMatch(facts, tuple(initial), tuple(dropped))


def match_folder(
    weights: PublishedTensors, table: Iterable[ParameterSpec], architecture: PublishedArchitecture
) -> tuple[tuple[OptionalBlock, ...], list[str]]:
    """Return the blocks that a folder lacks, and the names that a model lacks. Raises CheckpointError for others."""
    rows = tuple(table)
    lacking = blocks_lacking(architecture, rows, weights.tensors)
    initial = [spec.name for block in lacking for spec in rows if spec.name.startswith(block.prefixes)]
    return lacking, weights.check(rows, architecture, optional=initial)


def blocks_lacking(
    architecture: PublishedArchitecture, table: Iterable[ParameterSpec], names: Container[str]
) -> tuple[OptionalBlock, ...]:
    """Return the blocks of the table that a published folder with tensors of these names lacks.

    Some classes never have a block. For others it is optional, and their folders often leave all of its tensors out.
    """
    rows, blocks = tuple(table), []
    for block in BLOCKS:
        pieces = [piece for spec in rows if spec.name.startswith(block.prefixes) for piece in spec.pieces]
        if block.fact in architecture.fixed_sizes:
            lacking = bool(pieces)
        else:
            stored = any(architecture.hf_name(piece.hf_name) in names for piece in pieces)
            lacking = bool(pieces) and architecture.sets(block.fact) and not stored
        if lacking:
            blocks.append(block)
    return tuple(blocks)
