"""``megapar convert``: converts models between Hugging Face folders and checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megapar.core.status_line import StatusLine
from megapar.errors import MegaparError
from megapar.files.uri import refuse_wrong
from megapar.tools.parser import Parser, count, failed


def make_parser() -> Parser:
    """Return the parser of the command."""
    examples = ("hf-to-megapar downloaded runs/start", "megapar-to-hf runs/tiny released")
    parser = Parser(prog="megapar convert", description="Convert models, one tensor at a time.", examples=examples)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    importer = commands.add_parser("hf-to-megapar", help="a Hugging Face folder to a checkpoint")
    exporter = commands.add_parser("megapar-to-hf", help="a checkpoint of any layout to a Hugging Face folder")
    for command in (importer, exporter):
        command.add_argument("input", metavar="IN")
        command.add_argument("output", metavar="OUT")
    exporter.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="data type of the files (default: the type of the imported tensor, else fp32)",
    )
    exporter.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer to write with the model (default: the tokenizer of the run or of the imported folder)",
    )
    exporter.add_argument("--shard-mb", type=count, default=2048, help="maximum size of a file in MiB (default: 2048)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run hf-to-megapar or megapar-to-hf. Return the exit status: 0 done, 2 refused, 1 failed."""
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except (MegaparError, OSError) as error:
        return failed("convert", error)


def _run(args: argparse.Namespace) -> int:
    for place in (args.input, args.output):
        refuse_wrong(place)
    from megapar.checkpoints.export.export import UNDROPPED
    from megapar.checkpoints.export.from_hf import hf_to_megapar
    from megapar.checkpoints.export.to_hf import megapar_to_hf
    from megapar.data.tokenizers.load import load_tokenizer
    from megapar.training.step.dtypes import DTYPES

    with StatusLine.on(sys.stderr) as status:
        if args.command == "hf-to-megapar":
            done = hf_to_megapar(args.input, args.output, status)
        else:
            tokenizer = load_tokenizer(args.tokenizer_model) if args.tokenizer_model else None
            more = {"dtype": DTYPES.get(args.dtype), "shard_bytes": args.shard_mb << 20, "tokenizer": tokenizer}
            done = megapar_to_hf(args.input, args.output, **more, status=status)
    hint = f"; to train from it, use --load {done.folder}" if args.command == "hf-to-megapar" else ""
    print(f"{done.folder}: {done.architecture.name}, {done.tensors} tensors, {done.bytes:,} bytes{hint}")
    if args.command == "hf-to-megapar" and done.architecture.trained_as:
        print(f"a run writes it as {done.architecture.trained_as}: {done.architecture.remark}")
    if args.command == "megapar-to-hf" and not done.tokenizer:
        print("no tokenizer was written: none is stored with the checkpoint. Pass one with --tokenizer-model PATH.")
    if done.drops_tokens:
        print(UNDROPPED)
    for kind, tensors in done.quantized.items():
        print(f"{tensors} tensors were in {kind}; they are dequantized, and exported in bf16")
    if done.carried:
        print(f"kept with the checkpoint, because the model does not use them: {', '.join(done.carried)}")
    return 0
