"""The first lines of a run's log: versions, hosts, flags and data, printed by rank 0."""

from __future__ import annotations

import shlex
import socket
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

import torch

from megapar import __version__
from megapar.arguments import FLAGS, GROUPS, Config
from megapar.config.compilation import compilation
from megapar.config.draft import is_given
from megapar.config.help import written
from megapar.core.comm import json_messages as messages
from megapar.core.comm.world import World
from megapar.core.device.kinds import device_class
from megapar.data.contents import Content
from megapar.data.corpus import Corpus
from megapar.data.tokenizers.mock_tokenizer import MockTokenizer
from megapar.data.tokenizers.tokenizer import NoTokenizer
from megapar.schema.flag import Flag
from megapar.training.building.attention_backend import attention_kernels
from megapar.training.building.device_figures import kind_of_run, unknown_device
from megapar.training.step.evaluate import num_evaluated
from megapar.training.step.schedules import make_batch_size, make_progressive

WIDTH = 118
MOST_HOSTS = 6  # maximum number of hosts in a line
_INDENT = " " * 15


def hosts(world: World) -> list[str]:
    """Return the host of every rank, by rank. Every rank must call it."""
    own, axis = socket.gethostname(), world.axis("world")
    if axis.group is None:
        return [own]
    return [str(host) for host in messages.all_gather(own, axis.group)]


def opening(
    config: Config, world: World, corpus: Corpus, names: Sequence[str], *, compiled: bool = False
) -> Iterator[str]:
    """Yield the first lines of the log. ``names`` are the hosts, by rank; ``compiled``: functions of layers are."""
    started = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    versions = f"megapar {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    yield f"{versions}, {world.device.type}; started {started}"
    yield _hosts(names)
    yield from _flags(config)
    decision = compilation(config, device_class(world.device.type).compiler)
    yield f"compiled functions: {decision}{', but a rank cannot compile' if decision.on and not compiled else ''}"
    kind = kind_of_run(config, world.device.type, world.device.name)
    if unknown := unknown_device(config, world.device.type, world.device.name):
        yield unknown
    yield f"attention: {attention_kernels(config, replace(kind, capability=world.device.capability))}"
    yield from _data(config, corpus)


def _hosts(names: Sequence[str]) -> str:
    ranks = Counter(names)
    shown = [f"{name} ({count} rank{'s' * (count > 1)})" for name, count in list(ranks.items())[:MOST_HOSTS]]
    more = [f"{len(ranks) - MOST_HOSTS} more"] if len(ranks) > MOST_HOSTS else []
    return f"{len(ranks)} host{'s' * (len(ranks) > 1)}: {', '.join([*shown, *more])}"


def _flags(config: Config) -> Iterator[str]:
    """Yield the flags that differ from the defaults, as written on a command line, by group."""
    file, values = config.runtime.config, config.values()
    yield f"flags that differ from the defaults{f', {written(file)} included' if file else ''}:"
    for group in GROUPS:
        flags = [flag for flag in FLAGS.values() if flag.group == group and config.kind in flag.models]
        pairs = [(flag, values[flag.name]) for flag in flags if not flag.meta]
        written_flags = [_line(flag, value) for flag, value in pairs if _differs(config, flag, value)]
        if written_flags:
            yield from textwrap.wrap(
                " ".join(written_flags),
                WIDTH,
                initial_indent=f"  {group:13}",
                subsequent_indent=_INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )


def _differs(config: Config, flag: Flag, value: object) -> bool:
    return is_given(config.origins[flag.name]) and value != flag.defaults[config.kind]


def _line(flag: Flag, value: object) -> str:
    if isinstance(value, bool):
        return flag.spelling if value else f"--no-{flag.spelling.removeprefix('--').removeprefix('no-')}"
    if isinstance(value, tuple) and not flag.comma:
        return f"{flag.spelling} {' '.join(shlex.quote(str(item)) for item in value)}"
    return f"{flag.spelling} {shlex.quote(written(value, flag))}"


def _data(config: Config, corpus: Corpus) -> Iterator[str]:
    samples = samples_of(config)
    tokens = samples * config.model.seq_length
    iterations = config.training.train_iters
    yield from _side("trained on", corpus.contents)
    yield from _side("held out", corpus.heldout_contents)
    if corpus.heldout is not None and config.training.eval_interval:
        yield f"evaluation: {num_evaluated(config, corpus.heldout):,} of {len(corpus.heldout):,} held-out samples"
    rounds = epochs(samples, corpus.contents)
    whole = "" if rounds is None or (config.model.mixes_tasks) else f", {rounds}"
    yield f"this run:   {iterations:,} steps, {samples:,} samples, {tokens:,} positions{whole}"
    yield _tokenizer(config, corpus)


def _side(title: str, contents: Sequence[Content]) -> Iterator[str]:
    for number, content in enumerate(contents):
        yield f"{f'{title}:' if number == 0 else '':12}{content}"


def samples_of(config: Config) -> int:
    """Return the number of samples of all steps of a run."""
    iterations, batch = config.training.train_iters, make_batch_size(config)
    growing = make_progressive(config)
    if growing is not None:
        first = min(growing.iters, iterations)
        return sum(growing.batch_at(step) for step in range(first)) + (iterations - first) * growing.batch
    samples = step = 0
    while step < iterations and samples < batch.ramp_samples:
        samples, step = samples + batch.at(samples), step + 1
    return samples + (iterations - step) * batch.final


def epochs(samples: int, contents: Sequence[Content]) -> str | None:
    """Return the number of epochs over the data, for a mixture of each part. None if a size is unknown."""
    sizes = [content.samples for content in contents if content.samples]
    if len(sizes) < len(contents) or not sizes:
        return None
    weights = [content.weight for content in contents if content.weight is not None]
    if len(weights) < len(contents):
        return f"{samples / sum(sizes):.3g} epochs"
    shares = [float(weight / sum(weights)) * samples / size for weight, size in zip(weights, sizes, strict=True)]
    each = " and ".join(f"{share:.3g}" for share in shares)
    return f"{each} epochs of its parts" if len(shares) > 1 else f"{each} epochs"


def _tokenizer(config: Config, corpus: Corpus) -> str:
    tokenizer = corpus.tokenizer
    if isinstance(tokenizer, NoTokenizer):
        return f"tokenizer:  none, {tokenizer.size:,} ids"
    trained = "none, of random tokens" if isinstance(tokenizer, MockTokenizer) else "trained on this data"
    name = config.data.tokenizer_model or trained
    rows = "" if corpus.vocab_size == tokenizer.size else f" of {corpus.vocab_size:,} rows"
    return f"tokenizer:  {name}, {tokenizer.size:,} ids{rows}, fingerprint {tokenizer.fingerprint()}"
