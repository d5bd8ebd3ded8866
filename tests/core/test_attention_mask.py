"""The attention mask as a value: made from a micro-batch's ends, equal where it means the same, grouped by sample."""

from __future__ import annotations

import pytest

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING
from megapar.core.device.attention.table import CAUSAL, DOCUMENTS, FULL, MASKED, WINDOW, form_of


def test_ends_of_a_micro_batch_are_those_of_its_samples_and_back() -> None:
    mask = AttentionMask.of(2, 8, causal=True, ends=[3, 8, 9, 10, 16])
    assert mask.ends == ((3, 8), (1, 2, 8))
    assert mask.flat_ends == (3, 8, 9, 10, 16)
    assert mask == AttentionMask.of_documents([3, 8, 9, 10, 16], 2)
    assert hash(mask) == hash(AttentionMask(2, 8, True, ((3, 8), (1, 2, 8))))
    assert mask.document_lengths == (3, 5, 1, 1, 6)
    assert AttentionMask.of(2, 8, causal=True).flat_ends == (8, 16)


def test_samples_without_padding_are_documents_of_one_sequence() -> None:
    mask = AttentionMask.of_documents([4, 9], causal=False)
    assert (mask.samples, mask.length, mask.causal, mask.ends) == (1, 9, False, ((4, 9),))


def test_samples_that_are_alike_are_one_group() -> None:
    assert AttentionMask.of(2, 8, causal=True, ends=[5, 8, 13, 16]).groups() == [(None, (5, 8), 8)]
    assert AttentionMask.of(2, 8, causal=True, ends=[5, 8, 16]).groups() == [(0, (5, 8), 8), (1, (8,), 8)]
    assert AttentionMask.of(2, 8, causal=False, lengths=[8, 3]).groups() == [(0, (8,), 8), (1, (8,), 3)]


@pytest.mark.parametrize(
    ("mask", "form", "keys"),
    [
        (AttentionMask(2, 8, causal=True), CAUSAL, 4),
        (AttentionMask(2, 8, causal=False), FULL, 8),
        (AttentionMask(2, 8, causal=False, padded=True), MASKED, 8),
        (AttentionMask.of(2, 8, causal=False, lengths=[8, 3]), MASKED, 8),
        (AttentionMask(2, 8, causal=True, memory=3), MASKED, 11),
        (AttentionMask.of_documents([3, 8], causal=False), DOCUMENTS, 8),
    ],
)
def test_the_kernel_and_the_cost_follow_from_the_mask(mask: AttentionMask, form: str, keys: int) -> None:
    assert (form_of(mask), mask.mean_keys) == (form, keys)


def test_a_layer_with_a_window_has_a_mask_of_another_form_unless_the_window_hides_nothing() -> None:
    mask, packed = AttentionMask(2, 8, causal=True), AttentionMask.of_documents([3, 8, 9, 16], 2)
    for whole, longest in ((mask, 8), (packed, 7)):
        assert whole.within(0) is whole.within(longest) is whole.within(longest + 1) is whole
        assert (form_of(whole.within(longest - 1)), whole.within(3).window) == (WINDOW, 3)
        assert whole.within(3).flat_ends == whole.flat_ends
    for other in (AttentionMask(2, 8, causal=False), AttentionMask(2, 8, causal=True, memory=3)):
        with pytest.raises(ValueError, match="ends at its position"):
            other.within(3)


@pytest.mark.parametrize("window", [1, 3, 8, 63])
def test_the_keys_of_a_window_are_those_that_a_mask_counts(window: int) -> None:
    """Continuous where the window becomes the sample, in which half of the keys count; the diagonal is half a key."""
    length = 64
    counted = sum(min(window, row + 1) for row in range(length)) / length
    assert AttentionMask(1, length, causal=True, window=window).mean_keys == pytest.approx(
        counted - window / 2 / length, abs=1e-9
    )
    assert AttentionMask(1, length, causal=True, window=length).mean_keys == length / 2


def test_tiles_have_no_windows() -> None:
    with pytest.raises(NotImplementedError, match="windows"):
        AttentionMask(2, 8, causal=True, window=3).groups()


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_what_has_no_tiles_is_refused(algorithm: str) -> None:
    """Without the refusal, text would attend to other documents, and to later slices."""
    cp = ContextParallel(Axis("cp", 2, 0, None, (0, 1)), algorithm)
    with pytest.raises(ValueError, match="tiles of documents must be causal"):
        cp.plan(AttentionMask.of(1, 8, causal=False, ends=[3, 8]))
    with pytest.raises(ValueError, match="pass a causal mask"):
        cp.slice_plans(AttentionMask.of(1, 8, causal=False))
