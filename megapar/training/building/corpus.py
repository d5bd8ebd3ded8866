"""The corpus of a run, from its flags or from Python, and the micro-batches that are made of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from megapar.arguments import Config
from megapar.config.draft import is_given
from megapar.config.files import chat_day
from megapar.config.run import SFT
from megapar.core.comm.axis import Axis
from megapar.core.comm.world import World
from megapar.core.status_line import Status, silent
from megapar.data import corpus
from megapar.data.batches import Collate, Loader, pinned
from megapar.data.corpus import Corpus
from megapar.data.eval_tasks import open_tasks
from megapar.data.fetched import fetched, fetched_tokenizer
from megapar.data.own_data import CheckedPieces, OwnData
from megapar.data.reduced_batch import context_parallel_collate, unpadded_collate
from megapar.data.sample_maker import Packing
from megapar.data.sampling.skipping import Range, Skipping
from megapar.data.tasks.build import TaskData
from megapar.data.text.source import MOCK, PYTHON
from megapar.errors import Complaint, ConfigError
from megapar.files.location import at
from megapar.files.tokenizer_files import FOLDER
from megapar.files.uri import is_stored
from megapar.launch_environment import starts_before
from megapar.training.building.attention_backend import skips_padding
from megapar.training.building.epochs import chat_options
from megapar.training.building.partition import make_layout


def with_fetched_data(config: Config) -> Config:
    """Return the configuration with copies, in this node's cache, of tokens in object stores. Raises DataError."""
    data = config.data
    data = replace(data, data_path=fetched(data.data_path), eval_data_path=fetched(data.eval_data_path))
    return config if data == config.data else replace(config, data=data)


def make_corpus(config: Config, status: Status = silent) -> Corpus:
    """Return samples, tokenizer and held-out samples. Needs no process group. Raises DataError or ConfigError."""
    data = config.data
    if data.task == SFT and data.data_path != (MOCK,):
        return _with_tasks(config, _conversations(config, status))
    made = corpus.build(
        config.kind,
        data_path=data.data_path,
        eval_data_path=data.eval_data_path or (None if config.training.eval_interval else ()),
        split=data.split,
        tokenizer_model=data.tokenizer_model or _stored_tokenizer(config),
        vocab_size=config.model.vocab_size,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        mlm_probability=data.mlm_probability,
        packing=Packing(data.packing, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss),
        hf_dataset=data.hf_dataset,
        tasks=_task_data(config),
        text=corpus.TextOptions(data.text_field, data.document_per, data.on_bad_record == "skip"),
        status=status,
    )
    return _with_tasks(config, made)


def _with_tasks(config: Config, corpus: Corpus) -> Corpus:
    return replace(corpus, eval_tasks=open_tasks(config.data.eval_tasks, corpus.tokenizer, config.model.seq_length))


def _stored_tokenizer(config: Config) -> str | None:
    """Return the tokenizer next to checkpoints or a model in an object store, which only a start of ranks reads.

    On a disk, the configuration names it (``apply_stored_tokenizer``).
    """
    places = [at(root) / FOLDER for root in _stores(config, config.checkpoint.load)]
    if (published := config.checkpoint.load_hf) and is_stored(published):
        places.append(at(published))
    return next((found for place in places if (found := fetched_tokenizer(place)) is not None), None)


def _stores(config: Config, load: str | None) -> list[str]:
    """Return the stores that a run continues from: of a restarted job, the first is its own."""
    roots = (config.checkpoint.save if starts_before(os.environ) else None, load)
    return [root for root in roots if root and is_stored(root)]


def _conversations(config: Config, status: Status) -> Corpus:
    data, chat = config.data, chat_options(config.data)
    assert data.tokenizer_model is not None
    if config.origins["chat_date"] == "derived":
        stores = _stores(config, None if config.checkpoint.finetune else config.checkpoint.load)
        chat = replace(chat, day=next(filter(None, map(chat_day, stores)), chat.day))
    return corpus.of_conversations(
        chat,
        data_path=data.data_path,
        eval_data_path=data.eval_data_path or (None if config.training.eval_interval else ()),
        split=data.split,
        tokenizer_model=data.tokenizer_model,
        vocab_size=config.model.vocab_size,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        skip_bad=data.on_bad_record == "skip",
        status=status,
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
    """Return the samples of ``data``, tokenized as by ``--tokenizer-model`` if set. Raises DataError, ConfigError."""
    sizes = config.model.seq_length, config.model.vocab_size
    flags = config.data
    made = corpus.of_pieces(
        CheckedPieces(data.train, data.name, *sizes),
        None if data.heldout is None else CheckedPieces(data.heldout, data.name, *sizes),
        name=data.name,
        tokenizer_model=flags.tokenizer_model,
        vocab_size=config.model.vocab_size,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        packing=Packing(True, flags.reset_position_ids, flags.reset_attention_mask, flags.eod_mask_loss),
    )
    return _with_tasks(config, made)


def make_collate(config: Config, world: World, corpus: Corpus) -> Collate:
    """Return the function that makes pinned micro-batches of this rank's positions from whole samples."""
    collate = context_parallel_collate(corpus.collate, make_layout(config), world.axis("cp").rank)
    if skips_padding(config):
        collate = unpadded_collate(collate, config.parallel.mp_degree if config.parallel.sequence_parallel else 1)
    return pinned(collate, world.device.pin)


def make_loader(config: Config, corpus: Corpus, collate: Collate, data: Axis, skipped: Sequence[Range]) -> Loader:
    """Return the loader of this rank's micro-batches, a part of every global batch, without skipped samples."""
    return Loader(
        Skipping(corpus.train, skipped) if skipped else corpus.train,
        collate,
        micro_batch_size=config.training.micro_batch_size,
        data_rank=data.rank,
        data_ranks=data.size,
    )
