"""Covering sets cover."""

from __future__ import annotations

import itertools

from tests.support.pairwise import covering, pairwise


def test_every_legal_pair_is_there_in_few_rows() -> None:
    factors = ((1, 2, 3), "ab", (True, False), (4, 5, 6, 7))
    rows = pairwise(factors, lambda row: row[:2] != (1, "a"))
    assert all(row[:2] != (1, "a") for row in rows)
    assert len(rows) <= 16
    for (i, left), (j, right) in itertools.combinations(enumerate(factors), 2):
        for pair in itertools.product(left, right):
            if (i, j, pair) != (0, 1, (1, "a")):
                assert any((row[i], row[j]) == pair for row in rows), pair


def test_cheap_rows_are_taken_first_and_all_that_is_needed() -> None:
    rows = ["ab", "abc", "c", "abcd", "bd"]
    assert covering(rows, str, 1) == ["abcd"]
    assert sorted(covering(rows, str, 1, lambda row: len(row) ** 2)) == ["ab", "bd", "c"]
    assert covering(rows[:3], str, 2) == ["abc"]
    assert covering(rows, str, 1, chosen=["ab"]) == ["abcd"]
    assert covering(rows, str, 1, lambda row: len(row) ** 2, chosen=["ab", "bd"]) == ["c"]
