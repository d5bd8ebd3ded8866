"""Whether a translated command would start: every rule of the trainers, asked before anything is pasted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megapar.arguments import parse, resolved_values
from megapar.errors import Complaint, ConfigError

# Rows that are about files of this machine, where the script's need not be.
_ABOUT_FILES = ("file", "file-missing", "checkpoint-missing", "checkpoint", "record", "tokenizer", "package")
_MOST_RANKS = 4096
_LATER = "left-to-you"  # stands for a path while rules are asked


@dataclass(frozen=True)
class Answer:
    """ranks: asked for. said: the script says how many. complaints: of rules. files: of paths that are not here.

    fits: a number of ranks that the rules accept, where they refuse the script's.
    """

    ranks: int
    said: bool
    complaints: tuple[Complaint, ...]
    files: tuple[Complaint, ...]
    fits: int | None = None


def ask(kind: str, launcher: Sequence[str], trainer: Sequence[str], left: Sequence[str] = ()) -> Answer:
    """The rules' answer for these flags, for the script's ranks or, where it does not say, for the fewest that do.

    left: flags of paths that are left to the reader, and will be there.
    """
    words = [word for flags in trainer for word in shlex.split(flags)]
    words += [word for flag in left for word in (flag, _LATER)]
    said = _ranks(launcher)
    if said is None:
        return _fewest(kind, words)
    answer = _ask(kind, words, said, True)
    if answer.complaints:
        other = _fewest(kind, words)
        return answer if other.complaints else replace(answer, fits=other.ranks)
    return answer


def _fewest(kind: str, words: Sequence[str]) -> Answer:
    """The answer for the fewest ranks that are accepted; for those of the layout where none are."""
    ranks = least = _least(kind, words)
    first = answer = _ask(kind, words, ranks, False)
    while answer.complaints and ranks * 2 <= min(_MOST_RANKS, least * 64):
        ranks *= 2
        answer = _ask(kind, words, ranks, False)
    return first if answer.complaints else answer


def _ranks(launcher: Sequence[str]) -> int | None:
    """Nodes x ranks of a node; None where one of them is not said."""
    words = [word for flags in launcher for word in flags.split()]
    said = dict(pairwise(words))
    here, nodes = said.get("--nproc-per-node", ""), said.get("--nnodes", "1").rpartition(":")[2]
    return int(here) * int(nodes) if here.isdigit() and nodes.isdigit() else None


def _least(kind: str, words: Sequence[str]) -> int:
    values = resolved_values(kind, words, {})
    sizes = [values.get(name) for name in ("mp_degree", "pp_degree", "cp_degree", "sharding_degree")]
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return min(product, _MOST_RANKS)


def _ask(kind: str, words: Sequence[str], ranks: int, said: bool) -> Answer:
    try:
        parse(kind, words, {"WORLD_SIZE": str(ranks)})
    except ConfigError as error:
        rules = tuple(one for one in error.complaints if one.rule not in _ABOUT_FILES)
        files = tuple(one for one in error.complaints if one.rule in _ABOUT_FILES and _LATER not in one.message)
        return Answer(ranks, said, rules, files)
    return Answer(ranks, said, (), ())
