"""Samples without the ranges that a run skips because they harm training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megapar.data.sampling.samples import Sample, Samples

Range = tuple[int, int]


def parse_range(text: str) -> Range:
    """Parse ``A-B``, both included, as (A, B). Raises ValueError if the text is not a range."""
    match = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"{text!r} is not a range A-B of sample numbers with A <= B")
    return int(match[1]), int(match[2])


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges of the same numbers, sorted, without overlapping or adjacent ones."""
    result: list[Range] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(result[-1][1], last)
        else:
            result.append((first, last))
    return result


def sample_at(position: int, ranges: Sequence[Range]) -> int:
    """Return the number of the ``position``-th sample outside the (merged) ranges.

    ranges 2-3     position  0 1 2 3
                   sample    0 1 4 5
    """
    for first, last in ranges:
        if position < first:
            break
        position += last - first + 1
    return position


def effective(wanted: Sequence[Range], before: Sequence[Range], position: int) -> list[Range]:
    """Return the ranges of a run that resumes at a position: ``before`` up to the position, ``wanted`` after it.

    Samples that were already read keep their positions, so that the run continues with the sample that was next.
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
        """Return the number of samples of one epoch, including skipped ones, so that epochs keep their length."""
        return len(self.samples)

    def __getitem__(self, position: int) -> Sample:
        """Return the sample at a position of the run."""
        return self.samples[sample_at(position, self.ranges)]
