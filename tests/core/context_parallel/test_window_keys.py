"""Keys of a window on ranks: attention of the whole, in few bytes, and nothing is in flight afterwards."""

from __future__ import annotations

import pytest
import torch

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.accounts import CommBytes
from megapar.core.context_parallel.halo import halos_of, rows_exchanged
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES
from megapar.core.context_parallel.window_keys import _TakenRows
from megapar.core.device.attention.documents import packed_attention_reference
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.slices import packed_attention_slice_merged, packed_attention_slice_reference
from tests.core.context_parallel.test_method import GROUPS, LENGTH, MASKS, SAMPLES, SIZE, TOLERANCE, draw, make, worst
from tests.support.ranks import run_ranks
from tests.support.traffic import RecordedTraffic

CPU = torch.device("cpu")


def attended(method, q, k, v, mask, *, flash):
    """q, k, v [B, S/cp, heads, D] of this rank to y of the same, at once or slice by slice."""
    device, packed = DeviceMask(mask), packed_attention_slice_merged if flash else packed_attention_slice_reference
    parts, arrived, before = [], [], 0

    def kept(rows):
        arrived.append(rows)
        return torch.cat(arrived, dim=1)

    for halo in method.halos(mask):
        rows = sum(map(len, halo.runs))
        keys, values = method.window_keys.fetch(k[:, : before + rows], v[:, : before + rows], halo, kept)
        for run, own, seen in zip(halo.runs, halo.queries, halo.rows, strict=True):
            heads = (q[:, before:][:, own], keys[:, seen], values[:, seen])
            cut = device.cut(slice(run.start, run.stop))
            parts.append(packed(*(x.transpose(1, 2) for x in heads), documents=cut).transpose(1, 2))
        before += rows
    return torch.cat(parts, dim=1)


def compare(rank, size, algorithm, name, window, slices=1, dtype=torch.float64):
    """(worst error, launches and waits of forward and backward, bytes sent)."""
    mask, sent, comm = MASKS[name].within(window), CommBytes(), RecordedTraffic()
    method = make(rank, size, algorithm, comm, slices=slices, sent=sent)
    own = method.layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw(dtype=dtype))
    y = attended(method, q, k, v, mask, flash=dtype != torch.float64)
    forward = list(comm.events)
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    comm.check_settled()
    tensors = [x.double().requires_grad_() for x in draw(dtype=dtype)]
    whole = packed_attention_reference(*(x.transpose(1, 2) for x in tensors), mask=DeviceMask(mask)).transpose(1, 2)
    want = (whole, *torch.autograd.grad(whole.square().sum(), tensors))
    return worst((y, *grads), [x[:, own] for x in want]), forward, comm.events[len(forward) :], dict(sent)


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize(
    ("size", "name", "window", "slices"),
    [
        *((2, "causal", 2, 1), (2, "documents", 5, 1), (3, "documents", 7, 1), (4, "causal", 20, 1)),
        *((4, "documents", 11, 1), (2, "causal", 5, 3), (4, "documents", 15, 2), (4, "documents", 22, 4)),
    ],
)
def test_a_window_is_that_of_one_process(algorithm, size, name, window, slices):
    for error, *_ in run_ranks(size, compare, algorithm, name, window, slices, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_near(dtype):
    for error, *_ in run_ranks(2, compare, RING, "documents", 7, 1, dtype, backend="late"):
        assert error < TOLERANCE[dtype]


def test_only_the_keys_before_a_run_are_sent_once_each_way():
    """Zig-zag over two ranks: rank 1, in the middle, lacks one window's keys, and so does the last run of rank 0."""
    row = 2 * SAMPLES * GROUPS * SIZE * 8
    for _, forward, backward, sent in run_ranks(2, compare, RING, "causal", 5):
        assert forward == backward == ["all_to_all ^", "all_to_all v"]
        assert sent == {("cp", "all_to_all"): 2 * 4 * row}
    for _, forward, backward, _ in run_ranks(2, compare, GATHERED, "causal", 5, 3):
        assert forward == backward == ["all_to_all ^", "all_to_all v"] * 3


@pytest.mark.parametrize(("window", "rows"), [(5, 8), (14, 23), (15, 24), (20, 24), (47, 24)])
def test_rows_of_several_slices_are_sent_once(window, rows):
    """A rank of two has 24 rows: in a window of 15 and more, three slices get them all, as in a full exchange."""
    row, mask = 2 * SAMPLES * GROUPS * SIZE * 8, MASKS["causal"].within(window)
    layout = make(0, 2, RING, RecordedTraffic(), slices=3).layout
    counts = []
    for rank, (error, _, _, sent) in enumerate(run_ranks(2, compare, RING, "causal", window, 3)):
        halos = halos_of(layout, rank, mask)
        counts += [sum(len(run) for halo in halos for to in halo.sent for run in to)]
        counts += [sum(sum(halo.received) for halo in halos)]
        assert sent == {("cp", "all_to_all"): sum(counts[-2:]) * row}
        assert error < 1e-12
    assert max(counts) == rows_exchanged(layout, window, LENGTH)[0] == rows


def test_layouts_without_an_exchange_have_none():
    method = make(0, 1, RING, RecordedTraffic())
    assert method.halos(MASKS["causal"].within(5)) == ()
    for algorithm, mask in ((ULYSSES, MASKS["causal"].within(5)), (RING, MASKS["causal"])):
        assert make(0, 2, algorithm, RecordedTraffic()).halos(mask) == ()
    assert make(0, 2, RING, RecordedTraffic()).halos(AttentionMask(1, LENGTH, causal=True).within(LENGTH)) == ()


def test_a_row_that_is_taken_often_gets_the_sum_of_its_gradients():
    first, second = (torch.arange(6.0).view(3, 2).bfloat16().requires_grad_() for _ in range(2))
    taken = _TakenRows.apply([(0, range(3)), (1, range(1, 2)), (0, range(1, 3)), (0, range(2, 3))], first, second)
    assert taken.shape == (7, 2)
    taken.sum().backward()
    assert first.grad[:, 0].tolist() == [1, 2, 3]
    assert second.grad[:, 0].tolist() == [0, 1, 0]
    nothing = _TakenRows.apply([], first)
    assert nothing.shape == (0, 2)
    nothing.sum().backward()
    assert first.grad[:, 0].tolist() == [1, 2, 3]
