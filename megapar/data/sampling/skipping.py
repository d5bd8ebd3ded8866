"""Samples without some of them: what a run steps over because it poisons the training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megapar.data.sampling.samples import Sample, Samples

Range = tuple[int, int]


def parse_range(text: str) -> Range:
    """``A-B``, both included, as (A, B). Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"{text!r} is not a range A-B of sample numbers with A <= B")
    return int(match[1]), int(match[2])


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges of the same numbers, rising and not touching."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def sample_at(position: int, ranges: Sequence[Range]) -> int:
    """The number of the ``position``-th sample that no (merged) range holds.

    ranges 2-3     position  0 1 2 3
                   sample    0 1 4 5
    """
    for first, last in ranges:
        if position < first:
            break
        position += last - first + 1
    return position


def effective(wanted: Sequence[Range], before: Sequence[Range], position: int) -> list[Range]:
    """The ranges of a run that resumes at a position: those ``before`` it as they were, those ``wanted`` after it.

    What was read already stays where it is, so that the next sample is the one that the run would have read.
    """
    next_sample = sample_at(position, before)
    past = [(first, min(last, next_sample - 1)) for first, last in before if first < next_sample]
    ahead = [(max(first, next_sample), last) for first, last in wanted if last >= next_sample]
    return merged([*past, *ahead])


@dataclass(frozen=True)
class Skipping:
    """Samples by position, without the numbers in ``ranges`` (merged)."""

    samples: Samples
    ranges: Sequence[Range]

    def __len__(self) -> int:
        """Number of different samples, skipped ones included: epochs keep their length."""
        return len(self.samples)

    def __getitem__(self, position: int) -> Sample:
        """The sample at a position of the run."""
        return self.samples[sample_at(position, self.ranges)]
