"""Rows of experts: their order from a counting sort, and copies and sums of rows in that order, one pass each.

Numbers that change from step to step are not specialized, so that a kernel is compiled once for each shape of a model.
Copies move bits, so rows and weights are integers to them. Every row is copied by one program and every sum is added in
the order of the choices, so that all results repeat.

Shape letters: T tokens, k choices per token, H hidden, E experts, R rows, w columns of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # pairs x experts that a program compares at once, at most
MOST_PAIRS = 32
BLOCKS = 128  # programs of the sort: each adds up the counts of all
PROGRAMS = 512  # that move runs of rows: several move each if there are few
ROWS_AT_ONCE = 256
WIDEST = 2048  # columns that a program copies at once
WARPS = 4
BITS = {2: torch.int16, 4: torch.int32}


@triton.jit
def _is_kept(pair, kept, N, K, by_token, by_choice):  # type: ignore[no-untyped-def]
    is_kept = pair < N
    if kept is not None:
        place = kept + pair // K * by_token + pair % K * by_choice
        is_kept = is_kept & (tl.load(place, mask=is_kept, other=0) != 0)
    return is_kept


@triton.jit(do_not_specialize=["N", "steps"])
def _count(experts, kept, counts, N, steps, K, by_token, by_choice, PAIRS: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for step in range(steps):
        pair = (block * steps + step) * PAIRS + tl.arange(0, PAIRS)
        is_kept = _is_kept(pair, kept, N, K, by_token, by_choice)
        expert = tl.load(experts + pair, mask=is_kept, other=-1).to(tl.int32)
        total += tl.sum((expert[:, None] == bins[None, :]).to(tl.int32), 0)
    tl.store(counts + block * BINS + bins, total)


@triton.jit
def _mark_rows(  # type: ignore[no-untyped-def]
    pair_of, row_kept, first, steps, total, bins, num_kept, R, capacity, PAIRS: tl.constexpr, SPREAD: tl.constexpr
):
    for step in range(steps):
        row = first + step * PAIRS
        real = row < num_kept
        if SPREAD:
            owner = row // capacity
            count = tl.sum(tl.where(owner[:, None] == bins[None, :], total[None, :], 0), 1)
            real = row - owner * capacity < count
            tl.store(pair_of + row, 0 * row, mask=(row < R) & (real == 0))
        tl.store(row_kept + row, real, mask=row < R)


@triton.jit(do_not_specialize=["N", "R", "steps", "row_steps", "capacity"])
def _place(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    experts,
    kept,
    counts_by_block,
    pair_of,
    row_of,
    row_kept,
    counts,
    ends,
    N,
    R,
    steps,
    row_steps,
    capacity,
    K,
    by_token,
    by_choice,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
    BINS: tl.constexpr,
    SPREAD: tl.constexpr,
    FILL: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    bins, lane = tl.arange(0, BINS), tl.arange(0, PAIRS)
    total, place = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, blocks, PAIRS):
        line = start + lane
        part = tl.load(counts_by_block + line[:, None] * BINS + bins[None, :], mask=line[:, None] < blocks, other=0)
        total += tl.sum(part, 0)
        place += tl.sum(tl.where(line[:, None] < block, part, 0), 0)
    num_kept = tl.sum(total, 0)
    rest = num_kept + block * steps * PAIRS - tl.sum(place, 0)  # where pairs that are not kept go
    end = tl.cumsum(total, 0)
    place += bins * capacity if SPREAD else end - total
    if block == 0:
        more = tl.where(bins == E - 1, R - num_kept, 0) if FILL else 0 * bins
        tl.store(counts + bins, total + more, mask=bins < E)
        tl.store(ends + bins, end + more, mask=bins < E)
    for step in range(steps):
        pair = (block * steps + step) * PAIRS + lane
        inside, is_kept = pair < N, _is_kept(pair, kept, N, K, by_token, by_choice)
        expert = tl.load(experts + pair, mask=is_kept, other=-1).to(tl.int32)
        hot = (expert[:, None] == bins[None, :]).to(tl.int32)
        row = tl.sum(hot * (place[None, :] + tl.cumsum(hot, 0) - 1), 1)
        place += tl.sum(hot, 0)
        left = (inside & (is_kept == 0)).to(tl.int32)
        row = tl.where(is_kept, row, R if SPREAD else rest + tl.cumsum(left, 0) - 1)
        rest += tl.sum(left, 0)
        tl.store(pair_of + row, pair, mask=inside & (row < R))
        tl.store(row_of + pair, tl.minimum(row, tl.maximum(R - 1, 0)), mask=inside)
    if SPREAD or FILL:
        first = block * row_steps * PAIRS + lane
        _mark_rows(pair_of, row_kept, first, row_steps, total, bins, num_kept, R, capacity, PAIRS, SPREAD)


@triton.jit(do_not_specialize=["room", "length"])
def _order_runs(  # type: ignore[no-untyped-def]
    counts,
    pair_of,
    row_of,
    real,
    totals,
    ends,
    room,
    length,
    BLOCKS: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
    RUNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    run, stride, shelf = tl.program_id(0), tl.num_programs(1) * SIZE, SOURCES * EXPERTS
    block, expert, others = run // shelf, run % EXPERTS, tl.arange(0, RUNS)
    if counts is None:
        count = tl.where(others < BLOCKS * shelf, length, 0)
    else:
        count = tl.load(counts + others, mask=others < BLOCKS * shelf, other=0).to(tl.int32)
    run_length = tl.sum(tl.where(others == run, count, 0), 0)
    comes = block * room + tl.sum(tl.where((others // shelf == block) & (others < run), count, 0), 0)
    behind = (others % EXPERTS > expert) | ((others % EXPERTS == expert) & (others >= run))
    goes = tl.sum(tl.where(behind, 0, count), 0)
    offset = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    for start in range(0, run_length, stride):
        inside = start + offset < run_length
        tl.store(row_of + comes + start + offset, goes + start + offset, mask=inside)
        tl.store(pair_of + goes + start + offset, comes + start + offset, mask=inside)
        if real is not None:
            tl.store(real + comes + start + offset, tl.full((SIZE,), 1, tl.int8), mask=inside)
    if real is not None:
        padding = (block + 1) * room - comes - run_length
        if run % shelf == shelf - 1:
            for start in range(0, padding, stride):
                inside = start + offset < padding
                tl.store(row_of + comes + run_length + start + offset, 0 * offset, mask=inside)
                tl.store(real + comes + run_length + start + offset, tl.zeros((SIZE,), tl.int8), mask=inside)
    if (run < EXPERTS) & (tl.program_id(1) == 0):
        tl.store(totals + expert, tl.sum(tl.where(others % EXPERTS == expert, count, 0), 0))
        tl.store(ends + expert, tl.sum(tl.where(others % EXPERTS <= expert, count, 0), 0))


@triton.jit(do_not_specialize=["given"])
def _copy(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    rows,
    index,
    kept,
    weights,
    out,
    out_weights,
    given,
    H: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    W: tl.constexpr,
    W_STRIDE: tl.constexpr,
    OUT_W_STRIDE: tl.constexpr,
    BY_INDEX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    real = row < given
    if kept is not None:
        real = real & (tl.load(kept + row) != 0)
    features = tl.where(real, H, 0)  # of the row that are read
    at = row
    if index is not None:
        at = tl.load(index + row).to(tl.int64)
    for start in tl.static_range(0, H, WIDTH):
        column = start + tl.arange(0, WIDTH)
        x = tl.load(rows + at // K * STRIDE + column, mask=column < features, other=0)
        tl.store(out + row * OUT_STRIDE + column, x, mask=column < H)
    if weights is not None:
        part = tl.arange(0, W)
        bits = tl.load(weights + (at if BY_INDEX else row) * W_STRIDE + part, mask=part < tl.where(real, W, 0), other=0)
        tl.store(out_weights + row * OUT_W_STRIDE + part, bits, mask=part < tl.where(row < given, W, 0))


@triton.jit
def _sum(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    rows,
    row_of,
    kept,
    weights,
    out,
    out_weights,
    by_token,
    by_choice,
    H: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    W_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(K):
        features = H
        if kept is not None:
            features = tl.where(tl.load(kept + token * by_token + choice * by_choice) != 0, H, 0)
        at = tl.load(row_of + token * K + choice).to(tl.int64)
        total += tl.load(rows + at * STRIDE + column, mask=column < features, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)
    if weights is not None:
        every, part = tl.arange(0, CHOICES)[:, None], tl.arange(0, W)[None, :]
        if tl.program_id(1) == 0:
            inside = (every < K) & (part < W)
            read = inside
            if kept is not None:
                read = read & (tl.load(kept + token * by_token + every * by_choice, mask=every < K, other=0) != 0)
            source = tl.load(row_of + token * K + every, mask=every < K, other=0).to(tl.int64)
            bits = tl.load(weights + source * W_STRIDE + part, mask=read, other=0)
            tl.store(out_weights + (token * K + every) * W + part, bits, mask=inside)


def sort_pairs(
    experts: Tensor,
    kept: Tensor | None,
    num_experts: int,
    rows: int,
    capacity: int | None,
    fill: bool,
    order: tuple[Tensor, ...],
) -> None:
    """Sort the kept pairs by expert into ``rows`` rows, those of an expert in their own order.

    Args:
        experts: [T, k] int64, contiguous.
        kept: [T, k] bool; None: every pair is kept.
        rows: R. Without a capacity the pairs that are not kept come last, as far as there are rows.
        capacity: Rows of every expert, R / E; rows without a pair have pair 0. None: rows of experts are not padded.
        fill: Count the rows beyond the kept pairs for the last expert.
        order: As ``device.expert_rows.RowOrder``: pair, row, kept (empty if neither ``fill`` nor ``capacity`` is
            given), counts, ends.
    """
    pairs, bins = experts.numel(), max(16, triton.next_power_of_2(num_experts))
    size = max(8, min(MOST_PAIRS, ELEMENTS // bins))
    blocks = max(1, min(BLOCKS, triton.cdiv(pairs, size)))
    steps, row_steps = triton.cdiv(pairs, size * blocks), triton.cdiv(rows, size * blocks)
    by_block = experts.new_empty(blocks * bins, dtype=torch.int32)
    mask, strides = _mask(kept)
    shape = {"PAIRS": size, "BINS": bins}
    _count[(blocks,)](experts, mask, by_block, pairs, steps, experts.shape[1], *strides, **shape, num_warps=WARPS)
    pair, row, row_kept, counts, ends = order
    filled = (pair, row, row_kept.view(torch.uint8), counts, ends)
    numbers = (pairs, rows, steps, row_steps, capacity or 1, experts.shape[1], *strides)
    flags = {"E": num_experts, "SPREAD": capacity is not None, "FILL": fill}
    _place[(blocks,)](experts, mask, by_block, *filled, *numbers, **flags, **shape, num_warps=WARPS)


def order_runs(
    like: Tensor, shape: Sequence[int], room: int, rows: int, length: int, order: tuple[Tensor, ...]
) -> None:
    """Order received rows by expert. Pairs are places [blocks · room, 1] in the order of arrival.

    Args:
        like: [blocks, sources, L] int64, contiguous: lengths of the runs in their order of arrival; not read if all
            are ``length``.
        order: As ``device.expert_rows.RowOrder``. ``kept`` is of places: False for padding; empty if there is none.
    """
    blocks, sources, experts = shape
    pair, row, kept, counts, ends = order
    real = None if rows == blocks * room else kept.view(torch.uint8)
    runs = blocks * sources * experts
    sizes = {"BLOCKS": blocks, "SOURCES": sources, "EXPERTS": experts}
    grid = (runs, triton.cdiv(PROGRAMS, runs))
    tiles = {"RUNS": max(16, triton.next_power_of_2(runs)), "SIZE": ROWS_AT_ONCE}
    lengths = None if length else like
    _order_runs[grid](lengths, pair, row, real, counts, ends, room, length, **sizes, **tiles, num_warps=WARPS)


def copy_rows(rows: Tensor, index: Tensor, kept: Tensor | None, choices: int, out: Tensor) -> None:
    """Copy row ``index // choices``, or zeros where not kept."""
    _launch_copy(rows, out, rows.shape[1], index, kept, choices)


def pack_rows(
    rows: Tensor,
    weights: Tensor,
    columns: int,
    index: Tensor | None,
    kept: Tensor | None,
    choices: int,
    by_index: bool,
    message: Tensor,
) -> None:
    """Copy rows, as ``copy_rows``, each followed by the bits of a weight [.., w]: that of ``index``, or of the row."""
    hidden = rows.shape[1]
    columns_of_weights = message[:, hidden : hidden + weights.shape[1]]
    _launch_copy(rows, message, hidden, index, kept, choices, None, weights, columns_of_weights, by_index)


def unpack_rows(
    message: Tensor, hidden: int, w: int, index: Tensor | None, room: int, by_index: bool, parts: tuple[Tensor, Tensor]
) -> None:
    """Copy the rows and the weights of a message; without an index all of them, then rows of zeros up to ``room``."""
    given = message.shape[0] if index is None else None
    _launch_copy(message, parts[0], hidden, index, None, 1, given, message[:, hidden : hidden + w], parts[1], by_index)


def sum_rows(rows: Tensor, hidden: int, row: Tensor, kept: Tensor | None, out: Tensor) -> None:
    """Sum each token's rows [T, k] in fp32 to [T, H] in the dtype of ``rows``; False in ``kept``: not added."""
    _launch_sum(rows, hidden, row, kept, out)


def sum_message(
    message: Tensor, hidden: int, w: int, row: Tensor, kept: Tensor | None, results: tuple[Tensor, Tensor]
) -> None:
    """Compute ``sum_rows``, and copy the weights of its rows to [T · k, w], zeros for pairs that are not kept."""
    _launch_sum(message, hidden, row, kept, results[0], message[:, hidden : hidden + w], results[1])


def _launch_copy(
    rows: Tensor,
    out: Tensor,
    hidden: int,
    index: Tensor | None,
    kept: Tensor | None,
    choices: int,
    given: int | None = None,
    weights: Tensor | None = None,
    out_weights: Tensor | None = None,
    by_index: bool = False,
) -> None:
    """Copy row ``index[r] // choices`` to row r of ``out``, and a weight to row r of ``out_weights``.

    Rows have contiguous features, and may be apart. Those of ``out`` from ``given`` on are zeros, and get no weight.
    """
    count = out.shape[0]
    if count == 0:
        return
    bits = BITS[rows.element_size()]
    width = min(WIDEST, triton.next_power_of_2(hidden))
    parts = (x if x is None else x.view(bits) for x in (weights, out, out_weights))
    w = 1 if weights is None else weights.shape[1]
    strides = {"W_STRIDE": _stride(weights), "OUT_W_STRIDE": _stride(out_weights)}
    sizes = {"H": hidden, "K": choices, "STRIDE": _stride(rows), "OUT_STRIDE": _stride(out), "W": w, **strides}
    mask = None if kept is None else kept.view(torch.uint8)
    arguments = (rows.view(bits), index, mask, *parts, count if given is None else given)
    _copy[(count,)](*arguments, **sizes, BY_INDEX=by_index, WIDTH=width, num_warps=WARPS)


def _launch_sum(
    rows: Tensor,
    hidden: int,
    row: Tensor,
    kept: Tensor | None,
    out: Tensor,
    weights: Tensor | None = None,
    out_weights: Tensor | None = None,
) -> None:
    tokens, choices = row.shape
    if tokens == 0:
        return
    mask, strides = _mask(kept)
    width = min(WIDEST // 2, triton.next_power_of_2(hidden))
    bits = BITS[rows.element_size()]
    of_row, to_row = (None if x is None else x.view(bits) for x in (weights, out_weights))
    w = 1 if weights is None else weights.shape[1]
    sizes = {"H": hidden, "K": choices, "STRIDE": _stride(rows), "W": w, "W_STRIDE": _stride(weights)}
    tiles = {"WIDTH": width, "CHOICES": triton.next_power_of_2(choices)}
    grid = (tokens, triton.cdiv(hidden, width))
    _sum[grid](rows, row, mask, of_row, out, to_row, *strides, **sizes, **tiles, num_warps=WARPS)


def _mask(kept: Tensor | None) -> tuple[Tensor | None, tuple[int, int]]:
    return (None, (0, 0)) if kept is None else (kept.view(torch.uint8), (kept.stride(0), kept.stride(1)))


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
