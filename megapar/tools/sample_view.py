"""``megapar data show``: a sample of a run as text, coloured by its documents and by what is learned."""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megapar.config.run import PRETRAIN, SFT
from megapar.errors import DataError
from megapar.files.disk import write_file
from megapar.tools.parser import count

if TYPE_CHECKING:
    from megapar.data.conversation_blend import ChatOptions
    from megapar.data.corpus import Corpus

_COLOURS = ("#dbeafe", "#fef3c7", "#dcfce7", "#fce7f3", "#ede9fe", "#ffedd5")
_STYLE = (
    "body{font:14px/1.6 ui-monospace,monospace;margin:2em;max-width:100ch}pre{white-space:pre-wrap}"
    "b{border-bottom:2px solid #dc2626}"
)
_LEARNED, _PLAIN = "\x1b[1;31m", "\x1b[0m"


class Stretch(NamedTuple):
    """Consecutive tokens of one document and one weight.

    Attributes:
        begin: Position of the first in the sample; ``end``: that after the last.
        document: Number of the document in the sample.
        first: Position of the first token in its document.
        weight: Of each of its tokens as a target; 0: it is not learned.
    """

    begin: int
    end: int
    document: int
    first: int
    weight: float
    text: str


def stretches(sample: Any, corpus: Corpus) -> Iterator[Stretch]:
    """Yield the stretches of a decoder's sample, without its padding, with the last label as its last token."""
    from megapar.data.lazy_numpy import np
    from megapar.data.sampling.samples import NO_LOSS, WEIGHTS

    shown = getattr(corpus.tokenizer, "shown", corpus.tokenizer.decode)
    valid = int(sample["valid"].sum()) if "valid" in sample else len(sample["tokens"])
    labels = sample["labels"][:valid]
    weights = sample.get(WEIGHTS, (sample["labels"] != NO_LOSS).astype(np.float32))[:valid]
    ids = sample["tokens"][:valid]
    if labels[-1] != NO_LOSS:
        ids = np.append(ids, labels[-1])
    of_token = np.concatenate([[0.0], weights])[: len(ids)]
    ends = sample["ends"] if "ends" in sample else np.array([len(sample["tokens"])])
    begins = np.concatenate([[0], ends[:-1]])
    documents = np.searchsorted(begins, np.arange(len(ids)), side="right") - 1
    edges = np.flatnonzero((np.diff(of_token) != 0) | (np.diff(documents) != 0)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(ids)], strict=True):
        document = int(documents[begin])
        first = begin - int(begins[document])
        yield Stretch(begin, end, document, first, float(of_token[begin]), shown(ids[begin:end].tolist()))


def terminal(rows: Sequence[Stretch], colour: bool) -> str:
    """Return the stretches as lines of a terminal: the document, its positions, the weight and the text."""
    lines = []
    for row in rows:
        weight = f"{row.weight:.3g}" if row.weight else "-"
        text = row.text if row.text.isprintable() else repr(row.text)[1:-1]
        text = f"{_LEARNED}{text}{_PLAIN}" if colour and row.weight else text
        last = row.first + row.end - row.begin - 1
        lines.append(f"document {row.document}  {row.first:5}-{last:<5}  weight {weight:>6}  {text}")
    return "\n".join(lines)


def page(rows: Sequence[Stretch], title: str) -> str:
    """Return the stretches as an HTML page that loads nothing: learned text is underlined, documents have colours."""
    parts = []
    for row in rows:
        place = f"document {row.document}, positions {row.first} to {row.first + row.end - row.begin - 1}"
        tag = "b" if row.weight else "span"
        colour = _COLOURS[row.document % len(_COLOURS)]
        parts.append(
            f'<{tag} style="background:{colour}" title="{place}, weight {row.weight:.3g}">'
            f"{html.escape(row.text)}</{tag}>"
        )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style><h1>{html.escape(title)}</h1><pre>{''.join(parts)}</pre></html>\n"


def add_chat_flags(parser: argparse._ArgumentGroup) -> None:
    """Add the flags that decide the tokens of conversations, as a run has them."""
    parser.add_argument("--chat-template", metavar="FILE", help="template in place of the tokenizer's")
    parser.add_argument("--chat-date", metavar="DAY", help="the day for the template, YYYY-MM-DD (default: today)")
    parser.add_argument("--sft-turns", choices=("all", "last"), default="all", help="the learned turns (default: all)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``megapar data show``."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="as in --data-path: files, folders, prefixes, weights")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="number of the sample of a run (default: 0)")
    parser.add_argument("--tokenizer-model", required=True, help="the tokenizer of the run")
    parser.add_argument("--seq-length", type=count, default=1024, help="tokens per sample (default: 1024)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the run (default: 1234)")
    parser.add_argument("--split", help="the split of the run (default: 95,5)")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    chat = parser.add_argument_group("conversations")
    chat.add_argument("--task", choices=(PRETRAIN, SFT), default=SFT, help="sft: conversations, the default; pretrain")
    add_chat_flags(chat)
    chat.add_argument("--sft-packing", choices=("best_fit", "pad"), default="best_fit", help="as in a run")
    chat.add_argument("--sft-loss", choices=("token", "conversation"), default="token", help="as in a run")
    chat.add_argument("--sft-overlong", choices=("stop", "drop", "truncate"), default="stop", help="as in a run")
    parser.set_defaults(run=show)


def chat_options(args: argparse.Namespace) -> ChatOptions:
    """Return the options of conversations. Raises DataError for a day that is none."""
    from megapar.data.conversation_blend import ChatOptions

    try:
        day = date.fromisoformat(args.chat_date) if args.chat_date else date.today()
    except ValueError as error:
        raise DataError(f"--chat-date {args.chat_date}: {error}; write YYYY-MM-DD") from error
    names = ("packing", "loss", "overlong")
    given = {name: getattr(args, f"sft_{name}") for name in names if hasattr(args, f"sft_{name}")}
    return ChatOptions(template=args.chat_template, day=day.isoformat(), turns=args.sft_turns, **given)


def show(args: argparse.Namespace) -> int:
    """Print a sample, and write its page. Return the exit status."""
    from megapar.data.corpus import build, of_conversations
    from megapar.data.tokenizers.load import load_tokenizer

    if args.sample < 0:
        raise DataError(f"--sample {args.sample}: samples are numbered from 0")
    size = load_tokenizer(args.tokenizer_model).size
    run = {"data_path": args.paths, "split": args.split, "tokenizer_model": args.tokenizer_model, "vocab_size": size}
    run |= {"seq_length": args.seq_length, "seed": args.seed, "eval_data_path": ()}
    corpus = of_conversations(chat_options(args), **run) if args.task == SFT else build("moe", **run)
    rows = list(stretches(corpus.train[args.sample], corpus))
    title = f"sample {args.sample} of {', '.join(args.paths)}"
    learned = sum(row.end - row.begin for row in rows if row.weight)
    print(f"{title}: {rows[-1].end} tokens, {rows[-1].document + 1} documents, {learned} learned tokens")
    print(terminal(rows, sys.stdout.isatty()))
    if args.html:
        write_file(Path(args.html), page(rows, title).encode())
    return 0
