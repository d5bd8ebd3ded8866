"""Which pairs of option values are legal, and cases that run them all.

A pair is *legal* where a case that the table draws has it, *refused* where the rules refuse every case that it is
forced into, and *undrawn* where they accept one that the table would not draw (docs/fuzzing.md says which, and why).
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megapar.arguments import KINDS, parse
from megapar.errors import ConfigError
from tests.fuzz.case import (
    BACKENDS,
    CONTINUED,
    KINDS_DRAWN,
    Atom,
    Case,
    Pair,
    atom_of,
    case_from,
    continued,
    draw_case,
    with_outcomes,
)
from tests.fuzz.option import Drawn
from tests.fuzz.table import OPTIONS, WORLD_SIZES

SEARCHED = 3000  # draws that are looked at first
TRIES, FORCED = 10, 4  # to draw, and to force, a pair that none of them has
PARENTS = 12  # draws kept of each value
CANDIDATES = 100  # of a case, of which the one with most new pairs is run: a draw takes a millisecond, a run seconds
ROWS = {row.name: row for row in OPTIONS}


@dataclass
class Pairs:
    """What is known of the pairs.

    legal: each with a draw that has it. refused: with the row that refuses it. covered: those of legal that were run.
    """

    legal: dict[Pair, Drawn] = field(default_factory=dict)
    refused: dict[Pair, str] = field(default_factory=dict)
    undrawn: set[Pair] = field(default_factory=set)
    covered: set[Pair] = field(default_factory=set)

    def missing(self) -> list[Pair]:
        """Legal ones that were not run, in a fixed order."""
        return sorted(self.legal.keys() - self.covered)

    def __str__(self) -> str:
        return (
            f"{len(self.legal):,} pairs legal, of which {len(self.legal.keys() & self.covered):,} covered; "
            f"{len(self.refused):,} refused by rules; {len(self.undrawn):,} accepted, but not drawn"
        )

    def save(self, path: Path) -> None:
        """As JSON, so that a later run goes on."""
        draws = {id(drawn): drawn for drawn in self.legal.values()}
        numbers = {key: number for number, key in enumerate(draws)}
        state = {
            "draws": list(draws.values()),
            "legal": [[*pair, numbers[id(drawn)], pair in self.covered] for pair, drawn in self.legal.items()],
            "refused": [[*pair, rule] for pair, rule in self.refused.items()],
            "undrawn": [list(pair) for pair in self.undrawn],
        }
        path.write_text(json.dumps(state))

    @classmethod
    def load(cls, path: Path) -> Pairs:
        """What ``save`` wrote."""
        state = json.loads(path.read_text())
        draws = [Drawn({name: _hashable(value) for name, value in drawn.items()}) for drawn in state["draws"]]
        found = cls()
        for first, second, number, covered in state["legal"]:
            pair = tuple(first), tuple(second)
            found.legal[pair] = draws[number]
            if covered:
                found.covered.add(pair)
        found.refused = {(tuple(first), tuple(second)): rule for first, second, rule in state["refused"]}
        found.undrawn = {(tuple(first), tuple(second)) for first, second in state["undrawn"]}
        return found


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Search:
    """Finds which pairs there are, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.found = Pairs()
        self.parents: dict[tuple[str, Atom], list[Drawn]] = defaultdict(list)

    def run(self) -> Pairs:
        """Look at many draws, then for every pair of values that none of them has."""
        for _ in range(SEARCHED):
            kind, world_size = self.rng.choice(KINDS_DRAWN), self.rng.choice(WORLD_SIZES)
            self._keep(draw_case(kind, world_size, lambda name, values, drawn: self.rng.choice(values)))
        for kind in KINDS:
            atoms = sorted(atom for k, atom in self.parents if k == kind)
            for pair in itertools.combinations(atoms, 2):
                if pair[0][0] != pair[1][0] and pair not in self.found.legal:
                    self._look_for(kind, pair)
        return self.found

    def _keep(self, drawn: Drawn) -> None:
        pairs = case_from(drawn).pairs()
        for pair in pairs:
            self.found.legal.setdefault(pair, drawn)
            self.found.refused.pop(pair, None)
            self.found.undrawn.discard(pair)
        for atom in {atom for pair in pairs for atom in pair}:
            parents = self.parents[drawn.kind, atom]
            if len(parents) < PARENTS:
                parents.append(drawn)

    def _look_for(self, kind: str, pair: Pair) -> None:
        """Cross draws that have one half of the pair with draws that have the other; at last, force both halves."""
        for drawn in itertools.islice(self._crossed(kind, pair, force=False), TRIES):
            if _has(drawn, pair):
                self._keep(drawn)
                return
        rules: Counter[str] = Counter()
        for drawn in itertools.islice(self._crossed(kind, pair, force=True), FORCED):
            if not _has(drawn, pair):
                continue
            refused_by = _refusals(case_from(drawn))
            if not refused_by:
                self.found.undrawn.add(pair)
                return
            rules.update(refused_by)
        # A value that a row derives, such as a degree of the ranks that are left, cannot be forced at all.
        self.found.refused[pair] = rules.most_common(1)[0][0] if rules else "arithmetic"

    def _crossed(self, kind: str, pair: Pair, *, force: bool) -> Iterator[Drawn]:
        while True:
            mother, father = (self.rng.choice(self.parents[kind, atom]) for atom in pair)
            share = self.rng.random()
            wanted = _labels(mother) | {n: label for n, label in _labels(father).items() if self.rng.random() < share}
            wanted |= dict(pair)
            yield _guided(self.rng, kind, wanted, dict(pair) if force else {})


def _has(drawn: Drawn, pair: Pair) -> bool:
    labels = _labels(drawn) | {"kind": drawn.kind, "world_size": atom_of_size(drawn.world_size)[1]}
    return all(labels[name] == label for name, label in pair)


def _labels(drawn: Drawn) -> dict[str, str]:
    return {name: atom_of(ROWS[name], value)[1] for name, value in drawn.items() if name in ROWS} | {
        "world_size": str(drawn.world_size)
    }


def _guided(rng: random.Random, kind: str, wanted: Mapping[str, str], forced: Mapping[str, str]) -> Drawn:
    """A draw that takes the wanted value of every row where it is legal; the forced ones whether legal or not."""
    sizes = [size for size in WORLD_SIZES if wanted["world_size"] in (str(size), atom_of_size(size)[1])]

    def choose(name: str, values: Sequence[Any], drawn: Drawn) -> Any:
        fitting = [value for value in values if atom_of(ROWS[name], value)[1] == wanted.get(name)]
        return rng.choice(fitting or values)

    wild = tuple(name for name in forced if name in ROWS)
    values = {name: _values_of(name, forced[name]) for name in wild}
    if not all(values.values()):
        return draw_case(kind, rng.choice(sizes or WORLD_SIZES), choose)
    return draw_case(kind, rng.choice(sizes or WORLD_SIZES), choose, forced=values)


def atom_of_size(world_size: int) -> Atom:
    """What a number of ranks counts as."""
    return atom_of(ROWS["mp_degree"], world_size)


def _values_of(name: str, label: str) -> list[Any]:
    """Values of a row that count as this, from its list or from what it may be given anyhow."""
    row = ROWS[name]
    if label == "default":
        return [None]
    listed = [] if callable(row.values) else list(row.values)
    known = [value for value in (*listed, *row.wild) if value is not None and row.group(value) == label]
    return known or [int(label)] if label.lstrip("-").isdigit() else known


def _refusals(case: Case) -> list[str]:
    try:
        parse(case.kind, case.flags(), {"WORLD_SIZE": str(case.world_size)})
    except ConfigError as error:
        return [complaint.rule for complaint in error.complaints]
    return []


class Directed:
    """Cases that have pairs which none before had, from one seed: for each row the value with most new pairs."""

    def __init__(self, pairs: Pairs, seed: int) -> None:
        self.pairs = pairs
        self.rng = random.Random(seed)
        self.given_up: set[Pair] = set()

    def next(self) -> Case | None:
        """None where all legal pairs were run, or asked for already."""
        missing = [pair for pair in self.pairs.missing() if pair not in self.given_up]
        if not missing:
            return None
        target = self.rng.choice(missing)
        self.given_up.add(target)  # where its case fails, another one may cover it
        partners: dict[Atom, set[Atom]] = defaultdict(set)
        for first, second in missing:
            partners[first].add(second)
            partners[second].add(first)
        new = set(missing)
        drawn = max(self._candidates(target, partners), key=lambda drawn: len(case_from(drawn).pairs() & new))
        case = case_from(drawn, backend=self.rng.choice(BACKENDS))

        def choose(name: str, values: Sequence[Any], drawn: Drawn) -> Any:
            return self.rng.choice(values)

        continues = case.by_bits or not self.rng.randrange(CONTINUED)
        return with_outcomes(continued(case, choose) if continues else case, choose)

    def _candidates(self, target: Pair, partners: Mapping[Atom, set[Atom]]) -> list[Drawn]:
        """Draws with the target: its witness, and others that follow it here and there."""
        witness = self.pairs.legal[target]
        found = [witness]
        for number in range(CANDIDATES):
            drawn = self._candidate(witness, dict(target), partners, follows=1 - number / CANDIDATES)
            if _has(drawn, target):
                found.append(drawn)
        return found

    def _candidate(
        self, witness: Drawn, target: Mapping[str, str], partners: Mapping[Atom, set[Atom]], follows: float
    ) -> Drawn:
        wanted = _labels(witness)
        here: set[Atom] = {("kind", witness.kind), atom_of_size(witness.world_size)}

        def choose(name: str, values: Sequence[Any], drawn: Drawn) -> Any:
            row = ROWS[name]
            if name in target or self.rng.random() < follows:
                fitting = [value for value in values if atom_of(row, value)[1] == wanted.get(name)]
                chosen = self.rng.choice(fitting or values)
            else:
                worth = {value: len(partners.get(atom_of(row, value), set()) & here) for value in values}
                best = max(worth.values())
                chosen = self.rng.choice([value for value in values if worth[value] == best])
            if row.counted:
                here.add(atom_of(row, chosen))
            return chosen

        return draw_case(witness.kind, witness.world_size, choose)
