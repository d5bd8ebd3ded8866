"""Check of a translated command against all rules of the trainers, before the command is pasted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megapar.arguments import parse, resolved_values
from megapar.errors import Complaint, ConfigError
from megapar.tools.translation.number import whole

# Rules about files on this machine. The files of the script may be elsewhere.
_ABOUT_FILES = ("file", "file-missing", "checkpoint-missing", "checkpoint", "record", "tokenizer", "package")
_MOST_RANKS = 4096
_LATER = "left-to-you"  # placeholder for a path during the check


@dataclass(frozen=True)
class Answer:
    """Result of the compatibility rules for a command.

    Attributes:
        ranks: Number of ranks that was checked.
        specified: The script specifies the number of ranks.
        complaints: Violated rules.
        files: Violated rules about paths and packages that do not exist on this machine.
        fits: A number of ranks that the rules accept, if they refuse the script's; else None.
    """

    ranks: int
    specified: bool
    complaints: tuple[Complaint, ...]
    files: tuple[Complaint, ...]
    fits: int | None = None


def check(kind: str, launcher: Sequence[str], trainer: Sequence[str], left: Sequence[str] = ()) -> Answer:
    """Check flags against the rules, for the script's number of ranks or, if unspecified, the minimum that is accepted.

    Args:
        kind: Kind of trainer.
        launcher: Flags of ``megapar launch``.
        trainer: Flags of the trainer.
        left: Flags of paths that are left to the user; the paths are assumed to exist.
    """
    words = [word for flags in trainer for word in shlex.split(flags)]
    words += [word for flag in left for word in (flag, _LATER)]
    ranks = _ranks(launcher)
    if ranks is None:
        return _fewest(kind, words)
    answer = _check(kind, words, ranks, True)
    if answer.complaints:
        other = _fewest(kind, words)
        return answer if other.complaints else replace(answer, fits=other.ranks)
    return answer


def _fewest(kind: str, words: Sequence[str]) -> Answer:
    """Return the answer for the minimum number of ranks that is accepted; for the layout's minimum if none is."""
    ranks = minimum = _minimum(kind, words)
    first = answer = _check(kind, words, ranks, False)
    while answer.complaints and ranks * 2 <= min(_MOST_RANKS, minimum * 64):
        ranks *= 2
        answer = _check(kind, words, ranks, False)
    return first if answer.complaints else answer


def _ranks(launcher: Sequence[str]) -> int | None:
    """Return nodes x ranks per node; None if one of them is unspecified."""
    words = [word for flags in launcher for word in flags.split()]
    values = dict(pairwise(words))
    per_node, nodes = whole(values.get("--nproc-per-node", "")), whole(values.get("--nnodes", "1").rpartition(":")[2])
    return per_node * nodes if per_node is not None and nodes is not None else None


def _minimum(kind: str, words: Sequence[str]) -> int:
    values = resolved_values(kind, words, {})
    sizes = [values.get(name) for name in ("mp_degree", "pp_degree", "cp_degree", "sharding_degree")]
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return min(product, _MOST_RANKS)


def _check(kind: str, words: Sequence[str], ranks: int, specified: bool) -> Answer:
    try:
        parse(kind, words, {"WORLD_SIZE": str(ranks)})
    except ConfigError as error:
        rules = tuple(one for one in error.complaints if one.rule not in _ABOUT_FILES)
        files = tuple(one for one in error.complaints if one.rule in _ABOUT_FILES and _LATER not in one.message)
        return Answer(ranks, specified, rules, files)
    return Answer(ranks, specified, (), ())
