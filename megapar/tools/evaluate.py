"""``megapar evaluate``: the held-out loss of a checkpoint of any layout, by the trainer's own evaluation.

megapar evaluate CHECKPOINT [--data-path PATH ... | --eval-data-path PATH ...] [--eval-tasks FILE ...] [FLAGS]
megapar evaluate CHECKPOINT --lm-eval TASKS

The flags of the model and its samples come from the checkpoint. The layout does not: it is a single process, or the
ranks of ``megapar launch ... evaluate``. Run as a module, this file is the program of one rank and takes the trainer's
command line: python .../run_module.py megapar.tools.evaluate KIND FLAGS...
"""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser, Namespace
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megapar.arguments import FLAGS, Config, parse_or_exit, resolved_values
from megapar.checkpoints.format.names import (
    LAYOUT_FILE,
    folders_below,
    newest_name,
    parse_checkpoint_name,
    stored_facts,
    stored_scalars,
)
from megapar.checkpoints.ownership.data_facts import SEPARATE, DataFacts
from megapar.checkpoints.ownership.identity import RECORD, Identity
from megapar.config.report import refusal
from megapar.config.run import SFT
from megapar.data.corpus import DEFAULT_SPLIT
from megapar.data.eval_tasks import OF_TASK
from megapar.data.sampling.skipping import sample_at
from megapar.data.text.source import MOCK
from megapar.data.tokenizers.ids import known_facts, same_ids
from megapar.errors import CheckpointError, Complaint, ConfigError, DataError, MegaparError
from megapar.files.data_files import may_be_text, split_name
from megapar.files.location import Location, at
from megapar.files.tokenizer_files import FACTS, FOLDER
from megapar.files.uri import refuse_wrong
from megapar.model.spec import STORED
from megapar.planning.variation import command_line
from megapar.schema.flag import normal
from megapar.schema.rule import either
from megapar.tools.harness import run_harness
from megapar.tools.parser import Parser, failed
from megapar.tools.pretrain import prepare_process
from megapar.training.loop.outline import outline

NO_TRAINING = ("--finetune", "--train-iters", "0", "--eval-interval", "1")
"""Flags of a run that loads weights, takes no step and evaluates."""
IN_PACKAGE = ("mock", "builtin")  # data that needs no file
_NO_DATA = ["--data-path", MOCK]
_GROUPS = ("model", "moe", "data")
_OF_SAMPLES = ("micro_batch_size", "global_batch_size", "seed", "dtype")


class Evaluated(Protocol):
    """The part of a run's outcome that an evaluation has."""

    @property
    def evaluation(self) -> dict[str, float] | None:
        """Means of the terms of the loss."""


def make_parser() -> ArgumentParser:
    """Return the parser of the command's own options. It leaves those of the trainer unparsed."""
    parser = Parser(
        prog="megapar evaluate",
        description="Print the held-out loss of a checkpoint of any layout. Options that are not listed here are flags "
        "of the trainer, such as --eval-iters, --device and the degrees of a layout: megapar pretrain moe --help.",
        examples=(
            "runs/tiny --data-path my.jsonl",
            "runs/tiny --eval-data-path other.jsonl --eval-iters 1000",
            "runs/tiny --lm-eval arc_easy",
        ),
        epilog="Several ranks: megapar launch --nproc-per-node N evaluate CHECKPOINT ... "
        "Exit status: 0 done, 2 refused, 1 anything else.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="folder or URI of --save, for its latest checkpoint, or one in it")
    add("--data-path", nargs="+", metavar="PATH", help="the text of the run, whose held-out share is evaluated")
    add("--eval-data-path", nargs="+", metavar="PATH", help="other text, all of which is held out")
    add("--tokenizer-model", metavar="PATH", help="the tokenizer of the run, if none is stored with the checkpoint")
    add("--lm-eval", nargs="+", metavar="TASK", help="run lm-evaluation-harness on an export: names or YAML files")
    add("--hf-cache", type=Path, metavar="DIR", help="keep the export for --lm-eval in DIR, and use it again")
    return parser


def main(argv: Sequence[str]) -> int:
    """Evaluate in this process, and exit. Returns only after a refusal or --lm-eval, with the status."""
    try:
        options, rest = make_parser().parse_known_args(list(argv))
        if options.lm_eval:
            print(run_harness(options, rest))
            return 0
        kind, *flags = trainer_line(argv)
    except ConfigError as error:
        sys.stderr.write(refusal(error.complaints))
        return error.exit_status
    except MegaparError as error:
        return failed("evaluate", error)
    run(kind, flags)


def trainer_line(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the kind of trainer and the flags of a run that evaluates the checkpoint.

    Reads the small files of the checkpoint. Raises CheckpointError, and ConfigError if data or tokenizer do not fit.
    """
    options, rest = make_parser().parse_known_args(list(argv))
    if options.lm_eval:
        message = "--lm-eval runs in a single process, without megapar launch."
        raise ConfigError([Complaint("evaluate-lm-eval", message, "Run megapar evaluate CHECKPOINT --lm-eval TASK.")])
    root, iteration = _place(options.checkpoint)
    if stored_facts(root, iteration) is None and len(below := folders_below(options.checkpoint)) == 1:
        root = at(below[0])
    found = stored_facts(root, iteration)
    spec = STORED.get(str(found[1].get("kind"))) if found is not None else None
    if found is None or spec is None:
        below = folders_below(options.checkpoint)
        fix = f"Did you mean {either(below[:3])}?" if below else "Pass the folder of --save or a checkpoint in it; "
        fix += "" if below else "convert a Hugging Face folder with megapar convert hf-to-megapar first"
        raise CheckpointError(f"{options.checkpoint} contains no readable checkpoint. {fix}")
    scalars = stored_scalars(found[0])
    identity = Identity.from_json(scalars.get(RECORD))
    load = ["--load", str(root), *([] if iteration is None else ["--ckpt-step", str(iteration)])]
    named = {normal(word.partition("=")[0]) for word in rest}
    data, tokenizer = _data(identity, options, named), _tokenizer(identity, options)
    groups = _GROUPS[:2] if data == _NO_DATA and "--eval-tasks" in named else _GROUPS  # scores read no flag of data
    recorded = [] if identity is None else _recorded(spec.kind, identity, _seq_length(identity, scalars), groups)
    if data == _NO_DATA and not tokenizer and (root / FOLDER / FACTS).is_file():
        tokenizer = ["--tokenizer-model", str(root / FOLDER)]
    if identity is not None and identity.flags.get("task") != SFT and "--document-per" not in named:
        text = may_be_text((*(options.data_path or ()), *(options.eval_data_path or ())))
        data += ["--document-per", identity.document_per] if text else []
    files = ["--data-source", "files"] if "--data-path" in data else []  # of a run on a dataset, too
    return (spec.kind, *recorded, *load, *data, *files, *tokenizer, *NO_TRAINING, *rest)


def _place(place: str) -> tuple[Location, int | None]:
    """Return the folder of checkpoints, and the iteration if ``place`` is one. Raises CheckpointError, ConfigError."""
    refuse_wrong(place)
    path = at(place)
    name = parse_checkpoint_name(path.name)
    if name is None or not (path / LAYOUT_FILE).is_file():
        return path, None
    if (newest := newest_name(path.parent, name[0])) != path.name:
        again = f"{path} was saved again, as {path.parent / newest}. Pass that one, or move one of them away"
        raise CheckpointError(again)
    return path.parent, name[0]


def _seq_length(identity: Identity, scalars: Mapping[str, Any]) -> int:
    """Return the sequence length of the data phase that the checkpoint was saved in."""
    consumed, skipped = scalars.get("consumed_samples"), scalars.get("skip_samples") or ()
    now = sample_at(consumed, [(first, last) for first, last in skipped]) if isinstance(consumed, int) else 0
    return identity.phases[bisect_left(identity.phases, now, lo=1, key=lambda one: one.start) - 1].data.seq_length


def _recorded(kind: str, identity: Identity, seq_length: int, groups: Sequence[str] = _GROUPS) -> list[str]:
    """Return the flags of the model and its samples, without those that follow from the others.

    A checkpoint records every value, but a flag that is given though another one switches it off is refused.
    """
    recorded: dict[str, Any] = {**identity.flags, "seq_length": seq_length, "seed": identity.data.seed}
    recorded.pop("document_per", None)  # an option of text
    if day := (identity.data.chat or {}).get("day"):  # a start from a store has another one among its flags
        recorded["chat_date"] = day
    wanted = {}
    for name, flag in FLAGS.items():
        if name in recorded and kind in flag.models and (flag.group in groups or name in _OF_SAMPLES):
            value = recorded[name]
            wanted[name] = tuple(value) if isinstance(value, list) else value
    defaults = {name: FLAGS[name].defaults[kind] for name in wanted}
    kept = {name: value for name, value in wanted.items() if defaults[name] is not None and value != defaults[name]}
    while True:  # one at a time, because a value that is derived may follow from the one before
        here = resolved_values(kind, command_line(kept), {})
        other = next((name for name in wanted if name not in kept and here.get(name) != wanted[name]), None)
        if other is None:
            return command_line(kept)
        kept[other] = wanted[other]


def _data(identity: Identity | None, options: Namespace, named: Set[str]) -> list[str]:
    """Return the flags of the data, beside the flags ``named``. Raises ConfigError if they are needed and missing."""
    if options.eval_data_path:  # a run needs training data, of which this one reads no sample
        training = options.data_path or [split_name(word)[1] for word in options.eval_data_path]
        return ["--data-path", *training, "--eval-data-path", *options.eval_data_path]
    if identity is None:
        return ["--data-path", *options.data_path] if options.data_path else []
    split, names = identity.data.split, [source.name for source in identity.data.sources]
    known = names if len(names) == 1 and names[0] in IN_PACKAGE and not identity.data.sources[0].named else None
    paths = options.data_path or known
    if paths is None and "--eval-tasks" in named and "--hf-dataset" not in named:  # the loss is not printed
        return _NO_DATA
    if not options.data_path and ("--hf-dataset" in named or identity.flags.get("data_source") == "hf"):
        return [] if split in (SEPARATE, DEFAULT_SPLIT) else ["--split", split]
    if paths is None or (split == SEPARATE and paths != ["mock"]):
        where = "separate held-out text (--eval-data-path)" if split == SEPARATE else f"{', '.join(names)}"
        message = f"the checkpoint comes from a run on {where}, and does not record its path."
        fix = "Pass --eval-data-path PATH, all of which is evaluated"
        fix += "." if split == SEPARATE else ", or --data-path with the data of the run, whose held-out share is."
        raise ConfigError([Complaint("evaluate-data", message, fix)])
    plain = split == DEFAULT_SPLIT or paths == ["mock"] or "--split" in named
    return ["--data-path", *paths, *([] if plain else ["--split", split])]


def _tokenizer(identity: Identity | None, options: Namespace) -> list[str]:
    """Return the flag of the tokenizer. Raises ConfigError if its ids are not those of the checkpoint."""
    if (path := options.tokenizer_model) is None:
        return []
    facts = known_facts(path)
    if (
        identity is not None
        and identity.tokenizer is not None
        and facts is not None
        and not same_ids(identity.tokenizer, facts)
    ):
        message = f"--tokenizer-model {path} has other ids than the tokenizer that the checkpoint was trained with."
        fix = "Leave it out if the run stored its tokenizer next to the checkpoints, or pass that one."
        raise ConfigError([Complaint("checkpoint-tokenizer", message, fix)])
    return ["--tokenizer-model", path]


def run(kind: str, flags: Sequence[str]) -> NoReturn:
    """Evaluate as one rank with the line of the trainer, and exit as ``trainer.main`` does."""
    prepare_process()
    config = parse_or_exit(kind, flags, outline=outline)
    if (os.environ.get("RANK") or "0") == "0":
        for note in _other_data(config):
            print(f"megapar evaluate: {note}", file=sys.stderr)

    from megapar.trainer import main as train  # imports torch, so only after the configuration is accepted

    loss = not config.data.eval_tasks or config.data.data_path != (MOCK,)
    train(config, after=partial(_print_result, loss=loss, causal=config.model.causal))


def _other_data(config: Config) -> Iterator[str]:
    """Yield a note if documents that are held out here may have been trained on there."""
    found = stored_facts(str(config.checkpoint.load), config.checkpoint.ckpt_step)
    identity = None if found is None else Identity.from_json(stored_scalars(found[0]).get(RECORD))
    if identity is None or config.data.eval_data_path:
        return
    try:
        here = DataFacts.of(config)
    except DataError:  # which the run reports
        return
    apart = [one.text for one in identity.data.differences(here) if one.field in ("sources", "split")]
    if apart:
        yield f"the data is not that of the run: {'; '.join(apart)}. Its held-out part may have been trained on"


def _print_result(outcome: Evaluated, *, loss: bool, causal: bool) -> None:
    """Print the result as rank 0, a number per line, as ``result_lines``."""
    if (os.environ.get("RANK") or "0") == "0" and outcome.evaluation is not None:
        print("\n".join(result_lines(outcome.evaluation, loss=loss, causal=causal)), flush=True)


def result_lines(means: Mapping[str, float], *, loss: bool = True, causal: bool = True) -> Iterator[str]:
    """Yield the loss and its terms in nats per token, the scores of tasks, and for a decoder the perplexity.

    Without ``loss``, yield only the scores; without ``causal``, no perplexity: exp(lm) of masked tokens is not one.
    """
    if loss:
        yield f"loss {means['loss']:.6f}"
    for name, mean in means.items():
        if name != "loss" and (loss or name.startswith(OF_TASK)):
            yield f"{name.removeprefix(OF_TASK)} {mean:.6f}"
    if loss and causal and "lm" in means:
        yield f"perplexity {math.inf if means['lm'] >= 700 else math.exp(means['lm']):.6g}"


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
