"""What each row of the table takes, at its limits, and which row is chosen."""

from __future__ import annotations

import pytest

from megapar.arguments import FLAGS
from megapar.core.device.attention.table import (
    AUTO,
    BACKENDS,
    BLOCKS,
    CANDIDATE,
    CAUSAL,
    CUDNN,
    DOCUMENTS,
    EFFICIENT,
    FLASH,
    FLASH3,
    FORMS,
    FULL,
    LOWER_RIGHT,
    MASKED,
    MATH,
    ROWS,
    TODAY,
    VARLEN,
    WINDOW,
    AttentionCall,
    choose,
    lacks,
    rows_of,
    takes,
)
from megapar.core.device.kinds import kinds

HOPPER = AttentionCall(CAUSAL, 128, 128, "bfloat16", (9, 0))
CONFIRMED = tuple(row._replace(standing="2026-12-01, NVIDIA H200") if row.kernel == CUDNN else row for row in ROWS)


def fitting(row):
    """A call that the row takes, of the largest heads."""
    size = row.largest - row.largest % row.multiple
    return AttentionCall(row.forms[0], size, size, row.dtypes[0], row.capabilities[0], row.dropout, row.repeats)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_row_takes_what_it_says_and_nothing_else(number):
    row = ROWS[number]
    call = fitting(row)
    for form in FORMS:
        assert (row.lacks(call._replace(form=form)) == "") == (form in row.forms)
    for capability in row.capabilities:
        assert row.lacks(call._replace(capability=capability, key_dim=64, value_dim=64)) == ""
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        assert (row.lacks(call._replace(dtype=dtype)) == "") == (dtype in row.dtypes)
    larger = row.largest + row.multiple
    assert str(row.largest) in row.lacks(call._replace(key_dim=larger, value_dim=larger))
    odd = call._replace(key_dim=row.multiple + 1, value_dim=row.multiple + 1)
    assert (row.lacks(odd) == "") == (row.multiple == 1)
    assert (row.lacks(call._replace(dropout=True)) == "") == row.dropout
    assert (row.lacks(call._replace(repeats=True)) == "") == row.repeats
    unequal = row.lacks(call._replace(key_dim=row.multiple, value_dim=2 * row.multiple))
    assert (unequal == "") == (row.kernel != CUDNN)


@pytest.mark.parametrize("number", [n for n, row in enumerate(ROWS) if row.kernel != MATH])
def test_a_row_is_for_its_capabilities_only(number):
    row = ROWS[number]
    (low, high), call = row.capabilities, fitting(row)
    assert "compute capability" in row.lacks(call._replace(capability=(low[0] - 1, 9)))
    assert "compute capability" in row.lacks(call._replace(capability=(high[0], high[1] + 1)))


def test_every_row_has_a_source_and_no_candidate_is_chosen_by_auto():
    assert all(row.source for row in ROWS)
    assert not any(row.standing == CANDIDATE for row in rows_of(AUTO))
    assert {row.kernel for row in ROWS if row.standing == CANDIDATE} == {CUDNN, FLASH3}


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (HOPPER, CUDNN),
        (HOPPER._replace(key_dim=256, value_dim=256), CUDNN),
        (HOPPER._replace(form=FULL, capability=(10, 3)), CUDNN),
        (HOPPER._replace(key_dim=256, value_dim=256, capability=(10, 0)), FLASH),
        (HOPPER._replace(capability=(8, 0)), FLASH),
        (HOPPER._replace(capability=(12, 0)), FLASH),
        (HOPPER._replace(key_dim=12, value_dim=12), FLASH),
        (HOPPER._replace(form=FULL, dropout=True), FLASH),
        (HOPPER._replace(repeats=True), FLASH),
        (HOPPER._replace(form=LOWER_RIGHT, capability=(8, 0)), FLASH),
        (HOPPER._replace(form=BLOCKS, capability=(10, 0)), FLASH),
        (HOPPER._replace(form=DOCUMENTS), VARLEN),
        (HOPPER._replace(form=DOCUMENTS, key_dim=12, value_dim=12), FLASH),
        (HOPPER._replace(form=DOCUMENTS, capability=(7, 0), dtype="float16"), EFFICIENT),
        (HOPPER._replace(form=WINDOW), VARLEN),
        (HOPPER._replace(form=WINDOW, dropout=True, capability=(8, 0)), VARLEN),
        (HOPPER._replace(form=WINDOW, key_dim=12, value_dim=12), MATH),
        (HOPPER._replace(form=WINDOW, dtype="float32"), MATH),
        (HOPPER._replace(form=BLOCKS, key_dim=12, value_dim=12), MATH),
        (HOPPER._replace(form=MASKED), EFFICIENT),
        (HOPPER._replace(dtype="float32"), EFFICIENT),
        (HOPPER._replace(capability=(7, 0), dtype="float16"), EFFICIENT),
        (HOPPER._replace(dtype="float64"), MATH),
    ],
)
def test_auto_is_todays_choice(call, kernel):
    row = choose(AUTO, call)
    assert (row.kernel, row.standing) == (kernel, TODAY)


def test_a_confirmed_row_is_chosen_where_it_fits_and_never_if_results_must_repeat():
    assert choose(AUTO, HOPPER, CONFIRMED).kernel == CUDNN
    assert choose(AUTO, HOPPER._replace(key_dim=256, value_dim=256), CONFIRMED).kernel == CUDNN
    assert choose(AUTO, HOPPER._replace(key_dim=256, value_dim=256, capability=(8, 0)), CONFIRMED).kernel == FLASH
    assert choose(AUTO, HOPPER._replace(repeats=True), CONFIRMED).kernel == FLASH
    assert choose(AUTO, HOPPER._replace(dropout=True), CONFIRMED).kernel == FLASH
    assert choose(AUTO, HOPPER._replace(form=DOCUMENTS), CONFIRMED).kernel == VARLEN


def test_a_name_selects_candidates_and_leaves_other_forms_to_todays_choice():
    assert choose(CUDNN, HOPPER).kernel == CUDNN
    assert choose(CUDNN, HOPPER._replace(form=DOCUMENTS)).kernel == VARLEN
    assert choose(FLASH3, HOPPER._replace(form=DOCUMENTS)).kernel == FLASH3
    assert choose(FLASH, HOPPER._replace(form=DOCUMENTS)).kernel == VARLEN
    assert choose(FLASH3, HOPPER._replace(capability=(8, 0))).kernel == FLASH
    assert takes(FLASH, HOPPER)
    assert not takes(VARLEN, HOPPER)


def test_a_name_lacks_something_if_it_takes_no_call_of_the_run():
    documents = HOPPER._replace(form=DOCUMENTS)
    assert lacks(AUTO, (documents,)) == ""
    assert lacks(CUDNN, (documents, HOPPER)) == ""
    assert "documents" in lacks(CUDNN, (documents,))
    assert "9.0" in lacks(FLASH3, (HOPPER._replace(capability=(8, 9)),))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1)])
def test_large_heads_on_gpus_with_little_shared_memory(capability):
    """torch's list of GPUs whose FlashAttention has no backward for them: chips of consumer cards."""
    little = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    for size, dropout, lacking in ((192, True, False), (200, False, True), (224, False, True), (256, False, False)):
        call = HOPPER._replace(capability=capability, key_dim=size, value_dim=size, dropout=dropout)
        assert takes(FLASH, call) == (not (little and lacking)), call
        kernel = CUDNN if capability == (9, 0) and not dropout else FLASH
        assert choose(AUTO, call).kernel == (EFFICIENT if little and lacking else kernel)
    dropped = HOPPER._replace(form=DOCUMENTS, capability=capability, key_dim=256, value_dim=256, dropout=True)
    assert takes(VARLEN, dropped) == (not little)
    assert ("193 to 224" in lacks(FLASH, (dropped._replace(form=CAUSAL),))) == little


def test_the_flag_has_the_names_of_the_table():
    assert tuple(FLAGS["attention_backend"].choices) == BACKENDS


def test_nvidias_gpus_have_a_capability_and_no_other_device():
    assert {name for name, kind in kinds().items() if kind.kernels == "cuda" and kind.capability is None} == {
        "mi300x-192g"
    }
    assert all(kind.capability is None for kind in kinds().values() if kind.kernels != "cuda")
    assert kinds()["h200-141g"].capability == (9, 0)
