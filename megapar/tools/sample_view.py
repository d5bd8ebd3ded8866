"""``megapar data show``: a sample of a run as text, coloured by its documents and by what is learned."""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megapar.config.config import FLAGS
from megapar.config.run import SFT
from megapar.config.values import BadValue, convert
from megapar.errors import DataError, MegaparError
from megapar.files.conversation import conversation_of
from megapar.files.data_files import blend_of, first_line, split_name
from megapar.files.disk import write_file
from megapar.schema.flag import Flag

if TYPE_CHECKING:
    from megapar.data.conversation_blend import ChatOptions
    from megapar.data.corpus import Corpus

_COLOURS = ("#dbeafe", "#fef3c7", "#dcfce7", "#fce7f3", "#ede9fe", "#ffedd5")
_STYLE = "body{font:14px/1.6 monospace;margin:2em}pre{white-space:pre-wrap}b{border-bottom:2px solid #dc2626}"
_LEARNED, _PLAIN = "\x1b[1;31m", "\x1b[0m"
_LONGEST_RECORD = 1 << 20  # bytes of the first record that are looked at
_ENCODING = ("chat_template", "chat_date", "sft_turns")
_OF_A_RUN = ("tokenizer_model", "split", "seq_length", "seed", "task", *_ENCODING, "sft_packing", "sft_loss")


class Stretch(NamedTuple):
    """Consecutive tokens ``first`` to ``last`` of a document, each a target of this weight; 0: not learned."""

    document: int
    first: int
    last: int
    weight: float
    text: str


def stretches(sample: Any, corpus: Corpus) -> Iterator[Stretch]:
    """Yield the stretches of a decoder's sample, without its padding, with the last label as its last token."""
    from megapar.data.lazy_numpy import np
    from megapar.data.sampling.samples import NO_LOSS, WEIGHTS

    shown = getattr(corpus.tokenizer, "shown", corpus.tokenizer.decode)
    valid = int(sample["valid"].sum()) if "valid" in sample else len(sample["tokens"])
    labels = sample["labels"][:valid]
    ids = np.append(sample["tokens"][:valid], labels[-1:][labels[-1:] != NO_LOSS])
    weights = sample.get(WEIGHTS, (sample["labels"] != NO_LOSS).astype(np.float32))[:valid]
    weights = np.concatenate([[0.0], weights])[: len(ids)]
    ends = sample.get("ends", np.array([len(sample["tokens"])]))
    begins = np.concatenate([[0], ends[:-1]])
    documents = np.searchsorted(begins, np.arange(len(ids)), side="right") - 1
    edges = (np.flatnonzero((np.diff(weights) != 0) | (np.diff(documents) != 0)) + 1).tolist()
    for begin, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        document = int(documents[begin])
        first, last = (at - int(begins[document]) for at in (begin, end - 1))
        yield Stretch(document, first, last, float(weights[begin]), shown(ids[begin:end].tolist()))


def terminal(rows: Sequence[Stretch], colour: bool) -> str:
    """Return the stretches as lines of a terminal: the document, its positions, the weight and the text."""
    lines = []
    for row in rows:
        weight = f"{row.weight:.3g}" if row.weight else "-"
        text = row.text if row.text.isprintable() else repr(row.text)[1:-1]
        text = f"{_LEARNED}{text}{_PLAIN}" if colour and row.weight else text
        lines.append(f"document {row.document}  {row.first:5}-{row.last:<5}  weight {weight:>6}  {text}")
    return "\n".join(lines)


def page(rows: Sequence[Stretch], title: str) -> str:
    """Return the stretches as an HTML page that loads nothing: learned text is underlined, documents have colours."""
    title, parts = html.escape(title), []
    for row in rows:
        tag, colour = "b" if row.weight else "span", _COLOURS[row.document % len(_COLOURS)]
        place = f"document {row.document}, positions {row.first} to {row.last}, weight {row.weight:.3g}"
        parts.append(f'<{tag} style="background:{colour}" title="{place}">{html.escape(row.text)}</{tag}>')
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"{head}<h1>{title}</h1><pre>{''.join(parts)}</pre></html>\n"


def add_run_flags(parser: argparse._ActionsContainer, names: Sequence[str] = ("task", *_ENCODING)) -> None:
    """Add flags of a run, with its meaning of them: by default those that decide the tokens of conversations."""

    def value(flag: Flag, text: str) -> Any:
        try:
            return convert(flag, text)
        except BadValue as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    for name in names:
        flag = FLAGS[name]
        more = {"choices": flag.choices or None, "default": flag.defaults["moe"], "help": flag.help.replace("%", "%%")}
        parser.add_argument(flag.spelling, type=partial(value, flag), **more)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``megapar data show``."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="as in --data-path: files, folders, prefixes, weights")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="number of the sample of a run (default: 0)")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    add_run_flags(parser.add_argument_group("as in a run"), (*_OF_A_RUN, "sft_overlong", "document_per"))
    parser.set_defaults(run=show, task=None)


def chat_options(args: argparse.Namespace) -> ChatOptions:
    """Return the options of conversations."""
    from megapar.data.conversation_blend import ChatOptions

    given = {name.removeprefix("sft_"): value for name, value in vars(args).items() if name.startswith("sft_")}
    return ChatOptions(template=args.chat_template, day=args.chat_date or date.today().isoformat(), **given)


def _of_conversations(path: str) -> bool:
    """Return True for prepared conversations, and for JSONL whose first record is one."""
    from megapar.data.tokens.indexed import without_suffix
    from megapar.data.tokens.prepared import CHAT

    path = split_name(path)[1]
    if Path(f"{without_suffix(path)}{CHAT}").is_file():
        return True
    try:
        conversation_of(first_line(Path(path), _LONGEST_RECORD)[1])
    except (OSError, MegaparError):
        return False
    return True


def show(args: argparse.Namespace) -> int:
    """Print a sample, and write its page. Return the exit status."""
    from megapar.data.corpus import TextOptions, build, of_conversations
    from megapar.data.tokenizers.load import load_tokenizer

    if args.sample < 0:
        raise DataError("samples are numbered from 0")
    if args.tokenizer_model is None:
        raise DataError("--tokenizer-model is needed: a file or a folder")
    try:
        blend_of(args.paths)
    except ValueError as error:
        raise DataError(f"{' '.join(args.paths)}: {error}") from error
    task = args.task or (SFT if any(map(_of_conversations, args.paths)) else "")
    run = {"data_path": args.paths, "eval_data_path": (), "vocab_size": load_tokenizer(args.tokenizer_model).size}
    run |= {name: getattr(args, name) for name in ("tokenizer_model", "split", "seq_length", "seed")}
    text = TextOptions(per=args.document_per)
    corpus = of_conversations(chat_options(args), **run) if task == SFT else build("moe", **run, text=text)
    rows = list(stretches(corpus.train[args.sample], corpus))
    title = f"sample {args.sample} of {', '.join(args.paths)}"
    tokens, learned = (sum(row.last + 1 - row.first for row in some) for some in (rows, [r for r in rows if r.weight]))
    print(f"{title}: {tokens} tokens, {rows[-1].document + 1} documents, {learned} learned tokens")
    print(terminal(rows, sys.stdout.isatty()))
    if args.html:
        write_file(Path(args.html), page(rows, title).encode())
    return 0
