"""The first lines of a run's log, printed by rank 0: versions, hosts, flags and data, then the model on its devices."""

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
from megapar.config.report import phase_lines, written
from megapar.core.comm import json_messages as messages
from megapar.core.comm.world import World
from megapar.core.device.apex import apex_installed
from megapar.core.device.base import Device
from megapar.core.device.kinds import TENSORWISE, TERA, device_class, kind_called
from megapar.core.units import GIBIBYTE
from megapar.data.corpus import Corpus
from megapar.data.sample_maker import Content
from megapar.data.tokenizers.tokenizer import MockTokenizer, NoTokenizer
from megapar.model.sizes import ModelSizes
from megapar.moe.dispatch_bytes import ExpertRows
from megapar.moe.sizes import MoeSizes
from megapar.schema.flag import Flag
from megapar.training.building.attention_backend import attention_kernels
from megapar.training.building.device_choices import kind_of_run, unknown_device
from megapar.training.building.parts import experts_dispatch
from megapar.training.building.rates import width_lines
from megapar.training.reports.monitor import Monitor
from megapar.training.step.dtypes import compute_dtype, with_dtype
from megapar.training.step.evaluate import num_evaluated
from megapar.training.step.job import Job
from megapar.training.step.schedules import make_progressive

FULL = "full"
SHORT_DOCUMENTS = 16  # documents are short if a sample has more tokens than this many of them
WIDTH = 118
MOST_HOSTS = 6  # maximum number of hosts in a line
_INDENT = " " * 15


def hosts(world: World) -> list[str]:
    """Return the host of every rank, by rank. Every rank must call it."""
    host_name, axis = socket.gethostname(), world.axis("world")
    if axis.group is None:
        return [host_name]
    return [str(host) for host in messages.all_gather(host_name, axis.group)]


def header(config: Config, device: Device) -> Iterator[str]:
    """Yield the first lines of the log, which need no data: versions and flags."""
    started = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    versions = f"megapar {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    yield f"{versions}, {device.type}; started {started}"
    yield from _flags(config) if is_full(config) else _line_of_flags(config)


def opening(
    config: Config, world: World, corpus: Corpus, host_names: Sequence[str], *, compiled: bool = False
) -> Iterator[str]:
    """Yield the lines after the header. ``host_names`` are by rank; ``compiled``: functions of layers are."""
    full = is_full(config)
    if full or len(host_names) > 1:
        yield _hosts(host_names)
    decision = compilation(config, device_class(world.device.type).compiler)
    refused = decision.on and not compiled
    if full or refused:
        yield f"compiled functions: {decision}{', but a rank cannot compile' if refused else ''}"
    settled = with_dtype(config, world.device)
    if unknown := unknown_device(settled, world.device.type, world.device.name):
        yield unknown
    yield from _fp8(config, world.device)
    if full:
        kind = replace(kind_of_run(settled, world.device.type, world.device.name), capability=world.device.capability)
        yield f"attention: {attention_kernels(settled, kind)}"
    yield from _data(config, corpus)


def is_full(config: Config) -> bool:
    """Return True if the log begins with all that is known, and False if only with what the run is."""
    return config.logging.log_start == FULL


def _fp8(config: Config, device: Device) -> Iterator[str]:
    if not config.training.fp8:
        return
    whole = config.training.fp8_recipe == TENSORWISE
    of = "an input, a gradient or a weight" if whole else "128 features or 128 x 128 of a weight"
    how = f"e4m3, a power of two as the scale of {of}; weight gradients are not in fp8"
    if device.type == "cpu":
        yield f"fp8: emulated, with dequantized operands in the dtype of the run ({how})"
        return
    known = kind_called(device.name) is not None or config.runtime.device_tflops is not None
    flops = kind_of_run(config, device.type, device.name).flops if known else {}
    peaks = [f"{flops[name] / TERA:,.0f} TFLOP/s in {name}" for name in ("bf16", "fp8") if name in flops]
    named = f" ({', '.join(peaks)})" if peaks else ""
    yield f"fp8: {how}; checkpoints keep nothing of it; MFU is of the peak in bf16{named}"


def _hosts(host_names: Sequence[str]) -> str:
    ranks = Counter(host_names)
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
        written_flags = [
            _line(flag, value)
            for flag, value in pairs
            if is_given(config.origins[flag.name]) and value != flag.defaults[config.kind]
        ]
        if written_flags:
            yield from textwrap.wrap(
                " ".join(written_flags),
                WIDTH,
                initial_indent=f"  {group:13}",
                subsequent_indent=_INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )


def _line_of_flags(config: Config) -> Iterator[str]:
    """Yield the flags of the command line, in at most two lines."""
    values = config.values()
    given = [flag for flag in FLAGS.values() if config.origins.get(flag.name) == "flag" and config.kind in flag.models]
    words = [written_flag for flag in given if (written_flag := _line(flag, values[flag.name]))]
    if words:
        text = textwrap.shorten(" ".join(words), 2 * WIDTH - 40, placeholder=" ... (--log-start full)")
        yield from textwrap.wrap(
            text, WIDTH, initial_indent=f"{'flags:':12}", subsequent_indent=" " * 12, break_on_hyphens=False
        )


def _line(flag: Flag, value: object) -> str:
    if isinstance(value, bool):
        return flag.spelling if value else flag.negation
    if isinstance(value, tuple) and not flag.comma:
        return f"{flag.spelling} {' '.join(shlex.quote(str(item)) for item in value)}"
    return f"{flag.spelling} {shlex.quote(written(value, flag))}"


def _data(config: Config, corpus: Corpus) -> Iterator[str]:
    iterations = config.training.train_iters
    samples, tokens = consumption(config)
    yield from _side("trained on", corpus.contents)
    yield from _side("held out", corpus.heldout_contents)
    length = config.model.seq_length
    if any(one.cut_files > 1 and SHORT_DOCUMENTS * (one.mean or length) < length for one in corpus.contents):
        yield f"{'':12}blank lines make documents that are much shorter than samples; --document-per file: whole files"
    if (sets := corpus.evaluation_sets) and config.training.eval_interval:
        read = sum(num_evaluated(config, samples) for samples in sets.values())
        yield f"evaluation: {read:,} of {sum(map(len, sets.values())):,} held-out samples"
    rounds = None if config.data.data_phases else epochs(samples, corpus.contents)
    whole = "" if rounds is None or (config.model.mixes_tasks) else f", {rounds}"
    yield f"this run:   {iterations:,} steps, {samples:,} samples, {tokens:,} positions{whole}"
    for number, line in enumerate(phase_lines(config)):
        yield f"{'' if number else 'phases:':12}{line}"
    if is_full(config) or not isinstance(corpus.tokenizer, NoTokenizer | MockTokenizer):
        yield _tokenizer(config, corpus)


def _side(title: str, contents: Sequence[Content]) -> Iterator[str]:
    for number, content in enumerate(contents):
        yield f"{f'{title}:' if number == 0 else '':12}{content}"


def consumption(config: Config) -> tuple[int, int]:
    """Return the number of samples and of positions of all steps of a run."""
    iterations, growing = config.training.train_iters, make_progressive(config)
    if growing is None:
        end = config.phases.after(iterations)
        return end.first_sample, end.first_position
    first = min(growing.iters, iterations)
    rest = (iterations - first) * growing.batch
    samples = sum(growing.batch_at(step) for step in range(first)) + rest
    grown = sum(growing.batch_at(step) * growing.length_at(step) for step in range(first))
    return samples, grown + rest * config.model.seq_length


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
    gives = "which gives " if rows and name == "trained on this data" else ""
    return f"tokenizer:  {name}, {gives}{tokenizer.size:,} ids{rows}, fingerprint {tokenizer.fingerprint()}"


def model_lines(config: Config, job: Job, monitor: Monitor) -> Iterator[str]:
    """Yield the lines about the layout, the model and the devices."""
    world = job.world
    full, dtype = is_full(config), compute_dtype(config, world.device)
    if full or config.grid.world_size > 1:
        buffers = f" (about {world.group_bytes / GIBIBYTE:.1f} GiB of buffers)" if world.group_bytes else ""
        yield f"{config.grid.describe()}, {world.num_groups} communicators{buffers}"
    if full and world.axis("ep").nodes is not None:
        yield f"dispatch of experts: {experts_dispatch(config, world.device).describe()}"
    if full and (bound := expert_bound(config, dtype.itemsize)):
        yield bound
    if full and (products := expert_products(config, job.sizes, world.device)):
        yield products
    yield from width_lines(config, job.table)
    if config.training.apex:
        yield f"norms, sums of weight gradients and AdamW: {apex_installed()} (--apex)"
    peak = f"{monitor.peak / 1e12:.3g} TFLOP/s ({monitor.peak_source})"
    model = f"{type(job.model).__name__}: {job.num_parameters:,} parameters"
    yield f"{model}, {world.device.name}, {str(dtype).removeprefix('torch.')}, peak {peak}"


def expert_products(config: Config, sizes: ModelSizes, device: Device) -> str:
    """Describe the products of experts: grouped GEMM, or one per expert. Returns "" without experts."""
    if not sizes.expert_widths:
        return ""
    if config.ampipe.use_pipe_experts:
        return "experts: one product per expert and piece of its rows (--use-pipe-experts)"
    dtype, emp = compute_dtype(config, device), config.parallel.expert_mp_degree
    widths = sorted({sizes.hidden_size, *(width // emp for width in sizes.expert_widths)})
    lacks = device.grouped_lacks(dtype, widths)
    if not lacks:
        return "experts: one grouped GEMM for all experts of a rank"
    return f"experts: one product per expert, with row counts that the host knows or reads once per layer: {lacks}"


def expert_rows(config: Config) -> tuple[int, int] | None:
    """Return the rows of a mixture-of-experts layer on one rank for one micro-batch: (under balanced load, at most).

    Returns None without experts, or if a capacity bounds the rows. Of several phases: that with the longest samples.
    """
    moe: MoeSizes | None = getattr(config.model, "moe", None)
    if moe is None or moe.has_capacity:
        return None
    grid = config.grid
    # Ranks that share the width of an expert process the tokens of all of them.
    split = grid.cp * (grid.mp if grid.emp == 1 else 1)
    positions = config.training.micro_batch_size * config.longest.model.seq_length // split
    rows = ExpertRows.of(moe, positions, grid.ep, 1, even=False)
    return rows.multiplied, rows.most


def expert_bound(config: Config, item_bytes: int) -> str:
    """Describe the memory that a dropless layer may keep for its rows. Returns "" if a capacity bounds it."""
    rows = expert_rows(config)
    if rows is None:
        return ""
    # Kept per row: the input, the outputs of the first product (gate and up), the activation and the output.
    inner = (3 if config.model.gated else 2) * config.value("moe_ffn_hidden_size")
    inner //= config.parallel.expert_mp_degree
    row_bytes = (2 * config.model.hidden_size + inner) * item_bytes
    usual, most = (f"{count:,} rows ({count * row_bytes / GIBIBYTE:.3g} GiB)" for count in rows)
    return f"dropless experts: {usual} per rank, layer and micro-batch under balanced load, at most {most}"
