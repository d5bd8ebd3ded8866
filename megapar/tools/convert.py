"""``megapar convert``: models between Hugging Face folders and checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megapar.errors import MegaparError
from megapar.tools.parser import Parser


def main(argv: Sequence[str]) -> int:
    """Run one of hf-to-megapar, megapar-to-hf; the exit status: 0 done, 1 or 2 failed."""
    parser = Parser(prog="megapar convert", description="Models in and out, tensor by tensor.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inward = commands.add_parser("hf-to-megapar", help="a Hugging Face folder to a checkpoint")
    outward = commands.add_parser("megapar-to-hf", help="a checkpoint of any layout to a Hugging Face folder")
    for command in (inward, outward):
        command.add_argument("input", metavar="IN")
        command.add_argument("output", metavar="OUT")
    outward.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of the files (default: each tensor as it came, else fp32)"
    )
    outward.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="goes with the model (default: what the run kept, or the published folder's)",
    )
    outward.add_argument("--shard-mb", type=int, default=2048, help="largest file in MiB (default 2048)")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except MegaparError as error:
        print(f"megapar convert: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"megapar convert: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    import torch

    from megapar.data.tokenizers.tokenizer import load_tokenizer
    from megapar.training.checkpoints.convert import hf_to_megapar, megapar_to_hf
    from megapar.training.checkpoints.export import UNDROPPED

    if args.command == "hf-to-megapar":
        done = hf_to_megapar(args.input, args.output)
        hint = f"; train from it with --load {done.folder}"
    else:
        tokenizer = load_tokenizer(args.tokenizer_model) if args.tokenizer_model else None
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
        size = max(1, args.shard_mb) << 20
        done = megapar_to_hf(args.input, args.output, dtype=dtypes[args.dtype], shard_bytes=size, tokenizer=tokenizer)
        hint = ""
    print(f"{done.folder}: {done.architecture.name}, {done.tensors} tensors, {done.bytes:,} bytes{hint}")
    if args.command == "hf-to-megapar" and done.architecture.trained_as:
        print(f"a run writes it as {done.architecture.trained_as}: {done.architecture.remark}")
    if args.command == "megapar-to-hf" and not done.tokenizer:
        print("no tokenizer is written: none lies beside the checkpoint; give it with --tokenizer-model PATH")
    if done.drops_tokens:
        print(UNDROPPED)
    if done.carried:
        print(f"carried along, as the model has no place for them: {', '.join(done.carried)}")
    return 0
