"""Plans of packs: every document once, no pack too full, as few as best-fit decreasing needs, fast and small."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.data.sampling.packing_plan import best_fit, one_each


def plainly(lengths: list[int], capacity: int) -> list[int]:
    """The room of each pack by best-fit decreasing, one document at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, pack) for pack, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.lists(st.integers(1, 24), min_size=1, max_size=60), st.integers(0, 3))
def test_runs_are_placed_as_documents_one_by_one(lengths: list[int], seed: int) -> None:
    plan = best_fit(np.array(lengths), 24, seed)
    assert sorted(plan.items.tolist()) == list(range(len(lengths)))
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == len(lengths)
    filled = np.add.reduceat(np.array(lengths)[plan.items], plan.offsets[:-1])
    assert sorted((24 - filled).tolist()) == plainly(lengths, 24)


def test_the_plan_follows_from_lengths_and_seed() -> None:
    lengths = np.random.default_rng(0).integers(1, 101, 5000)
    plan, same, other = best_fit(lengths, 100, 1), best_fit(lengths, 100, 1), best_fit(lengths, 100, 2)
    assert plan.digest() == same.digest() != other.digest()
    assert plan.packs == other.packs  # equal lengths are exchanged, no more
    assert plan.digest() == "d351897e5369df7f7a19bd57e3b5d7ee"  # checkpoints record it


def test_one_document_each() -> None:
    plan = one_each(3)
    assert (plan.packs, plan.items.tolist(), plan.offsets.tolist()) == (3, [0, 1, 2], [0, 1, 2, 3])


@pytest.mark.parametrize("lengths", [[], [0, 1], [5]])
def test_lengths_that_fit_no_pack_are_an_error(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="from 1 to 4"):
        best_fit(np.array(lengths, dtype=np.int32), 4, 0)


LARGE = """
import resource, sys
import numpy as np
from megapar.data.sampling.packing_plan import best_fit
lengths = (np.random.default_rng(0).pareto(1.1, 1_000_000) * 200 + 8).clip(8, 131072).astype(np.int32)
best_fit(lengths[:10], 131072, 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan = best_fit(lengths, 131072, 0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, lengths.sum() / plan.packs / 131072)
assert "torch" not in sys.modules
"""


def test_a_million_lengths_take_a_tenth_of_the_memory_of_ten_million() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    mebibytes, filled = map(float, done.stdout.split())
    assert mebibytes <= 40
    assert filled > 0.99
