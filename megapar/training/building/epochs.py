"""The steps of a run whose length is given in epochs."""

from __future__ import annotations

from dataclasses import replace

from megapar.arguments import Config
from megapar.compatibility import check
from megapar.data.corpus import Corpus
from megapar.errors import Complaint, ConfigError


def with_epochs(config: Config, corpus: Corpus) -> Config:
    """Return the configuration with the steps of ``--train-epochs``, if it is set: the whole global batches in them.

    Learning rates that end with the run follow. Raises ConfigError if an epoch has no global batch, or if the steps
    break a rule.
    """
    epochs, batch = config.training.train_epochs, config.training.global_batch_size
    if not epochs:
        return config
    steps = epochs * len(corpus.train) // batch
    if not steps:
        message = f"--train-epochs {epochs} of {len(corpus.train):,} samples do not fill a global batch of {batch:,}."
        raise ConfigError([Complaint("train-epochs", message, "Lower --global-batch-size, or raise --train-epochs.")])
    optimizer, derived = config.optimizer, {"train_iters": "derived"}
    if config.origins["lr_decay_iters"] == "derived":
        optimizer = replace(optimizer, lr_decay_iters=steps)
    if config.origins["lr_wsd_decay_iters"] == "derived":
        optimizer = replace(optimizer, lr_wsd_decay_iters=max(1, optimizer.lr_decay_iters // 10))
    training = replace(config.training, train_iters=steps)
    settled = replace(config, training=training, optimizer=optimizer, origins={**config.origins, **derived})
    if refused := check({**settled.values(), "kind": config.kind}).refused:
        raise ConfigError(refused)
    return settled
