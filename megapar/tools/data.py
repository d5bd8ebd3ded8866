"""``megapar data``: prepares and checks files of tokens, shows samples, and trains tokenizers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megapar.config.run import SFT
from megapar.core.status_line import StatusLine
from megapar.errors import DataError, MegaparError
from megapar.files.data_files import AUTO
from megapar.files.disk import write_file
from megapar.health.stop.process import cores
from megapar.tools import sample_view
from megapar.tools.parser import Parser, count, failed


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        prog="megapar data",
        description="Prepare, check and show data, and train tokenizers.",
        examples=(
            "prepare --input my.jsonl --tokenizer-model tokenizer.model --output data/my",
            "show my.jsonl --tokenizer-model tokenizer.model",
            "check data/my",
        ),
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _prepare_flags(commands.add_parser("prepare", help="tokenize documents into PREFIX.bin and PREFIX.idx"))
    sample_view.add_flags(commands.add_parser("show", help="show a sample of a run: its text, documents and targets"))
    _check_flags(commands.add_parser("check", help="check every index entry and every token of indexed files"))
    _train_flags(commands.add_parser("train-tokenizer", help="train a sentencepiece model on documents"))
    return parser


def main(argv: Sequence[str]) -> int:
    """Run prepare, show, check or train-tokenizer. Return the exit status: 0, 2 refused, 1 failed, 130 interrupted."""
    words = list(argv)
    if words[:1] in (["prepare"], ["train-tokenizer"]) and words[1:] and not words[1].startswith("-"):
        words.insert(1, "--input")  # paths may come first, as those of show and check do
    args = make_parser().parse_args(words)
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except (MegaparError, OSError) as error:
        return failed("data", error)
    except KeyboardInterrupt:
        print(
            "megapar data: interrupted; the same command resumes from the parts that are finished, if any",
            file=sys.stderr,
        )
        return 130


def _inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", nargs="+", action="extend", default=[], metavar="PATH", help="text, JSONL, parquet files or folders"
    )
    parser.add_argument("--hf-dataset", metavar="PATH", help="a datasets source on this machine")
    parser.add_argument("--hf-split", default="train", help="split of the datasets source (default: train)")
    parser.add_argument("--field", default="text", help="JSONL field or column of the document (default: text)")
    sample_view.add_run_flags(parser, ("document_per",))
    parser.add_argument(
        "--on-bad-record",
        choices=("stop", "skip"),
        default="stop",
        help="stop at the first broken record, or skip and count broken records (default: stop)",
    )


def _prepare_flags(parser: argparse.ArgumentParser) -> None:
    _inputs(parser)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx, .hashes (and .chat)")
    parser.add_argument("--tokenizer-model", required=True, help="sentencepiece model or Hugging Face tokenizer")
    parser.add_argument("--workers", type=count, default=cores(), help="number of processes (default: all cores)")
    parser.add_argument("--no-append-eod", action="store_true", help="do not append the end token to each document")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    sample_view.add_run_flags(parser.add_argument_group("as in a run"))
    parser.set_defaults(run=_prepare)


def _prepare(args: argparse.Namespace) -> int:
    from megapar.data.text.chunks import skipped_text
    from megapar.data.tokens.parts import Encoded
    from megapar.data.tokens.prepare import prepare

    if not args.input and args.hf_dataset is None:
        print("megapar data prepare: pass --input or --hf-dataset", file=sys.stderr)
        return 2
    ignored = {"field": "text", "document_per": AUTO, "no_append_eod": False}
    if args.task != SFT:
        ignored = {"chat_template": None, "chat_date": None, "sft_turns": "all"}
    if given := [name for name, default in ignored.items() if getattr(args, name) != default]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        print(f"megapar data prepare: {flags}: no effect with --task {args.task}", file=sys.stderr)
        return 2
    chat = sample_view.chat_options(args) if args.task == SFT else None
    start = time.monotonic()
    with StatusLine.on(sys.stderr) as status:
        done: Encoded = prepare(
            args.output,
            args.input,
            args.tokenizer_model,
            workers=args.workers,
            dataset=args.hf_dataset,
            split=args.hf_split,
            field=args.field,
            per=args.document_per,
            append_end=not args.no_append_eod,
            skip_bad=args.on_bad_record == "skip",
            report=_report,
            overwrite=args.overwrite,
            chat=None if chat is None else chat.settings_of(args.tokenizer_model),
            status=status,
        )
    seconds = time.monotonic() - start
    what = "documents" if chat is None else "conversations"
    print(
        f"{args.output}: {done.documents:,} {what}, {done.tokens:,} tokens in {seconds:.1f} s "
        f"({done.tokens / max(seconds, 1e-9):,.0f} tokens/s, {args.workers} worker{'s' * (args.workers > 1)})"
    )
    if done.bad:
        print(skipped_text(done.bad, list(done.first_bad)), file=sys.stderr)
    return 0


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="PREFIX.bin and PREFIX.idx")
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--vocab-size", type=count, help="refuse ids at or above this number")
    known.add_argument("--tokenizer-model", help="refuse ids that this tokenizer does not have")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    from megapar.data.tokenizers.load import load_tokenizer
    from megapar.data.tokens.indexed import IndexedDataset
    from megapar.data.tokens.prepared import read_hashes

    size = load_tokenizer(args.tokenizer_model).size if args.tokenizer_model else args.vocab_size
    status = 0
    for prefix in args.prefixes:
        try:
            dataset = IndexedDataset(prefix)
            summary = dataset.verify(size)
            read_hashes(dataset.prefix, dataset.documents)
        except MegaparError as error:
            status = failed("data", error)
            continue
        print(
            f"{prefix}: valid; {summary.documents:,} documents, {summary.sequences:,} sequences, "
            f"{summary.tokens:,} tokens of {dataset.dtype.name}, largest id {summary.largest}"
        )
    return status


def _train_flags(parser: argparse.ArgumentParser) -> None:
    _inputs(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="write the sentencepiece model to this file")
    parser.add_argument("--vocab-size", type=count, required=True, help="number of ids, including seven special ones")
    parser.add_argument("--hf", metavar="FOLDER", help="also write the tokenizer in Hugging Face's form to this folder")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model")
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from megapar.data.text.chunks import BadRecords, LineNumbers
    from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer, train
    from megapar.data.tokens.prepare import input_chunks

    if not args.input and args.hf_dataset is None:
        print("megapar data train-tokenizer: pass --input or --hf-dataset", file=sys.stderr)
        return 2
    output = Path(args.output)
    if output.is_dir():
        raise DataError(f"--output {output} is a folder; pass a file, such as {output / 'tokenizer.model'}")
    if output.exists() and not args.overwrite:
        raise DataError(f"--output {output} already exists; pass another file, or --overwrite to replace an old model")
    bad, numbers = BadRecords(stops=args.on_bad_record == "stop"), LineNumbers()
    chunks = input_chunks(args.input, args.hf_dataset, args.hf_split, args.field, _report, per=args.document_per)
    read = {chunk.path for chunk in chunks if chunk.kind != "rows" and chunk.head is None}
    if output.exists() and any(output.samefile(one) for one in read):
        raise DataError(f"--output {output} already exists, and is one of the inputs; pass another file")
    with StatusLine.on(sys.stderr) as status:
        status(f"training a tokenizer of {args.vocab_size:,} ids", 0, 0, "")
        model = train((text for chunk in chunks for text in chunk.documents(bad, numbers)), args.vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, model)
    tokenizer = SentencePieceTokenizer(model, name=args.output)
    if args.hf:
        tokenizer.save_hf(args.hf)
    print(f"{args.output}: {tokenizer.size} ids" + (f"; {args.hf}: the same for transformers" if args.hf else ""))
    if tokenizer.size < args.vocab_size:
        print(f"the model has fewer ids than --vocab-size {args.vocab_size:,}, because the text gives no more")
    if bad.count:
        print(str(bad), file=sys.stderr)
    return 0
