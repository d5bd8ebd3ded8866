"""The corpus of a run whose data Python code passes."""

from __future__ import annotations

from dataclasses import replace

from megapar.arguments import Config
from megapar.config.draft import is_given
from megapar.data import corpus
from megapar.data.corpus import Corpus
from megapar.data.own_data import CheckedPieces, OwnData
from megapar.data.sample_maker import Packing
from megapar.data.text.source import PYTHON
from megapar.errors import Complaint, ConfigError


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
