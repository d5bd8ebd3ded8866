"""The steps of a run whose length is given in epochs."""

from __future__ import annotations

from dataclasses import replace

from megapar.arguments import Config
from megapar.compatibility import check
from megapar.config.draft import is_given
from megapar.config.run import SFT, DataOptions
from megapar.data.conversation_blend import ChatOptions, compared, prepared_packs
from megapar.data.corpus import DEFAULT_SPLIT
from megapar.data.tokens.split import Split
from megapar.errors import Complaint, ConfigError, DataError


def chat_options(data: DataOptions) -> ChatOptions:
    """Return the options of a fine-tuning run's samples."""
    assert data.chat_date is not None
    names = ("turns", "packing", "overlong", "loss")
    given = {name: getattr(data, f"sft_{name}") for name in names}
    return ChatOptions(template=data.chat_template, day=data.chat_date, **given)


def with_epochs(config: Config, samples: int) -> Config:
    """Return the configuration with the steps of ``--train-epochs``, if it is set: the whole global batches in them.

    Learning rates that end with the run follow. Raises ConfigError if an epoch has no global batch, or if the steps
    break a rule. ``samples`` are those of an epoch.
    """
    epochs, batch = config.training.train_epochs, config.training.global_batch_size
    if not epochs:
        return config
    steps = epochs * samples // batch
    if not steps:
        message = f"--train-epochs {epochs} of {samples:,} samples do not fill a global batch of {batch:,}."
        raise ConfigError([Complaint("train-epochs", message, "Lower --global-batch-size, or raise --train-epochs.")])
    optimizer, derived = config.optimizer, {"train_iters": "derived"}
    if config.origins["lr_decay_iters"] == "derived":
        optimizer = replace(optimizer, lr_decay_iters=steps)
    if config.origins["lr_wsd_decay_iters"] == "derived":
        optimizer = replace(optimizer, lr_wsd_decay_iters=max(1, optimizer.lr_decay_iters // 10))
    training = replace(config.training, train_iters=steps)
    settled = replace(config, training=training, optimizer=optimizer, origins={**config.origins, **derived})
    given = frozenset(name for name, origin in settled.origins.items() if is_given(origin))
    if refused := check({**settled.values(), "kind": config.kind, "train_epochs": 0, "given": given}).refused:
        raise ConfigError(refused)
    return settled


def with_known_epochs(config: Config) -> Config:
    """Return the configuration with the steps of ``--train-epochs`` if the data is prepared, and notes about it.

    Raises ConfigError if a run would, also if others than the run's template and flags encoded the conversations.
    """
    epochs, data = config.training.train_epochs, config.data
    if data.task != SFT or data.tokenizer_model is None:
        return config
    split = None if data.eval_data_path else Split.parse(data.split or DEFAULT_SPLIT)
    sizes = config.model.seq_length, config.training.seed
    paths, chat = (*data.data_path, *(data.eval_data_path or ())), chat_options(data)
    try:
        notes = compared(paths, chat, data.tokenizer_model)
        packs = prepared_packs(data.data_path, chat, split, *sizes) if epochs else None
    except (DataError, OSError) as error:
        raise ConfigError([Complaint("data", f"{error}.")]) from error
    if not epochs:
        return replace(config, notes=(*config.notes, *notes)) if notes else config
    if packs is None:
        note = (
            f"--train-epochs {epochs}: the number of steps is known when the conversations are encoded, and "
            f"{config.training.train_iters} is assumed here; megapar data prepare --task sft encodes them beforehand"
        )
    else:
        config = with_epochs(config, packs)
        note = f"--train-epochs {epochs} of {packs:,} samples: {config.training.train_iters:,} steps"
    return replace(config, notes=(*config.notes, *notes, note))
