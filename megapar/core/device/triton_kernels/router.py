"""The router of experts after its product: scores, choices, gate weights, sums over tokens, and the gradient of logits.

A program has a few tokens with all experts. It adds up its own tokens, and torch the programs, so that results repeat.

fp32 matrices that enter products are cut into three bf16 parts, h + m + l, of 8 bits of the significand each: together
all 24. Products with bf16 factors are then exact, and their sums in fp32.

Shape letters: T tokens, E experts, k choices per token, P programs, C columns of a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapar.core.device.triton_operators import router_tile

WARPS = 4
SPLIT = 1024
TINY = tl.constexpr(1e-12)  # ``routing.SMALLEST_TOTAL``
LOWEST = tl.constexpr(-3.0e38)  # instead of NaN: above what cannot be chosen


@triton.jit
def _parts(x):  # type: ignore[no-untyped-def]
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split(matrix, parts, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high, middle, low = _parts(tl.load(matrix + at, mask=at < N, other=0.0))
    tl.store(parts + at, high, mask=at < N)
    tl.store(parts + N + at, high, mask=at < N)
    tl.store(parts + 2 * N + at, middle, mask=at < N)
    tl.store(parts + 3 * N + at, low, mask=at < N)


@triton.jit
def _sum_of_parts(at, mask, other, E: tl.constexpr):  # type: ignore[no-untyped-def]
    low, middle = tl.load(at + 2 * E, mask=mask, other=other), tl.load(at + E, mask=mask, other=other)
    return low + middle + tl.load(at, mask=mask, other=other)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _best(key, columns, lanes, K: tl.constexpr):  # type: ignore[no-untyped-def]
    chosen = tl.zeros((key.shape[0], lanes.shape[0]), tl.int32)
    for choice in tl.static_range(K):
        one = tl.argmax(key, 1)  # of equal keys the first
        chosen = tl.where(lanes[None, :] == choice, one[:, None], chosen)
        key = tl.where(columns[None, :] == one[:, None], float("-inf"), key)
    return chosen


@triton.jit
def _in_best_groups(key, columns, group_of, groups, G: tl.constexpr, TOPK: tl.constexpr, SCORED: tl.constexpr):  # type: ignore[no-untyped-def]
    scores = tl.full((key.shape[0], groups.shape[0]), float("-inf"), tl.float32)
    for group in range(G):
        inside = tl.where((group_of == group)[None, :], key, float("-inf"))
        score = tl.zeros((key.shape[0],), tl.float32)
        for _ in tl.static_range(SCORED):
            one = tl.argmax(inside, 1)
            score += tl.max(inside, 1)
            inside = tl.where(columns[None, :] == one[:, None], float("-inf"), inside)
        scores = tl.where(groups[None, :] == group, tl.maximum(score, LOWEST)[:, None], scores)
    allowed = tl.zeros(key.shape, tl.int1)
    for _ in tl.static_range(TOPK):
        one = tl.argmax(scores, 1)
        allowed = allowed | (group_of[None, :] == one[:, None])
        scores = tl.where(groups[None, :] == one[:, None], float("-inf"), scores)
    return tl.where(allowed, key, float("-inf"))


@triton.jit
def _scatter(values, chosen, columns, lanes, K: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.zeros((chosen.shape[0], columns.shape[0]), tl.float32)
    for choice in tl.static_range(K):
        column = tl.sum(tl.where(lanes[None, :] == choice, chosen, 0), 1)
        value = tl.sum(tl.where(lanes[None, :] == choice, values, 0.0), 1)
        tile += tl.where(columns[None, :] == column[:, None], value[:, None], 0.0)
    return tile


@triton.jit(do_not_specialize=["T"])
def _route(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    parts, bias, valid, given, logits, scores, lse, experts, weights, sums, T,
    E: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GROUP_TOPK: tl.constexpr, SCORED: tl.constexpr,
    BEST: tl.constexpr, SIGMOID: tl.constexpr, DIVIDES: tl.constexpr, SCALE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, GROUP_LANES: tl.constexpr,
):  # fmt: skip
    columns, lanes = tl.arange(0, COLUMNS), tl.arange(0, LANES)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, token = token < T, token.to(tl.int64)
    real, place = (columns < E)[None, :], token[:, None] * E + columns[None, :]
    known = inside[:, None] & real
    x = _sum_of_parts(parts + 2 * token[:, None] * E + place, known, 0.0, E)
    tl.store(logits + place, x, mask=known)
    x = tl.where(real, x, float("-inf"))
    most = tl.max(x, 1)
    share = tl.exp(x - most[:, None])
    one = tl.sum(share, 1)
    log, share = most + tl.log(one), share / one[:, None]
    score = share
    if SIGMOID:
        score = _sigmoid(x)
        share = score / tl.maximum(tl.sum(score, 1), TINY)[:, None]
    tl.store(lse + token, log, mask=inside)
    tl.store(scores + place, score, mask=known)
    choices, is_choice = token[:, None] * K + lanes[None, :], inside[:, None] & (lanes < K)[None, :]
    plain = tl.where(real, tl.where(score == score, score, LOWEST), float("-inf"))
    if given is not None:
        chosen = tl.load(given + choices, mask=is_choice, other=0).to(tl.int32)
    else:
        key = plain
        if bias is not None:
            key = score + tl.load(bias + columns, mask=columns < E, other=0.0)[None, :]
            key = tl.where(real, tl.where(key == key, key, LOWEST), float("-inf"))
        if GROUP_TOPK < G:
            key = _in_best_groups(key, columns, columns // (E // G), tl.arange(0, GROUP_LANES), G, GROUP_TOPK, SCORED)
        chosen = _best(key, columns, lanes, K)
    tl.store(experts + choices, chosen.to(tl.int64), mask=is_choice)
    weight = _sum_of_parts(parts + 3 * token[:, None] * E + chosen, is_choice, float("-inf"), E)
    if SIGMOID:
        weight = _sigmoid(weight)
        if DIVIDES:
            weight /= tl.maximum(tl.sum(weight, 1), TINY)[:, None]
    elif DIVIDES:  # the softmax of some logits: exact where their scores vanish
        weight = tl.exp(weight - tl.max(weight, 1)[:, None])
        weight /= tl.sum(weight, 1)[:, None]
    else:
        weight = tl.exp(weight - log[:, None])
    tl.store(weights + choices, weight * SCALE, mask=is_choice)
    counted = inside
    if valid is not None:
        counted = counted & (tl.load(valid + token, mask=inside, other=0) != 0)
    pairs = (counted[:, None] & (lanes < K)[None, :]).to(tl.float32)
    best = tl.zeros((COLUMNS,), tl.float32)
    if BEST > 0:
        best = tl.sum(_scatter(pairs, _best(plain, columns, lanes, BEST), columns, lanes, BEST), 0)
    at = sums + tl.program_id(0).to(tl.int64) * 4 * COLUMNS + columns
    tl.store(at, tl.sum(tl.where(counted[:, None], share, 0.0), 0))
    tl.store(at + COLUMNS, tl.sum(_scatter(pairs, chosen, columns, lanes, K), 0))
    tl.store(at + 2 * COLUMNS, best)
    tl.store(at + 3 * COLUMNS, tl.where(columns == 0, tl.sum(tl.where(counted, log * log, 0.0), 0), 0.0))


@triton.jit(do_not_specialize=["T"])
def _route_backward(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    logits, lse, experts, weights, valid, d_scores, d_weights, d_total, d_squares, parts, T,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, DIVIDES: tl.constexpr, SCALE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    columns, lanes = tl.arange(0, COLUMNS), tl.arange(0, LANES)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, token = token < T, token.to(tl.int64)
    known, place = inside[:, None] & (columns < E)[None, :], token[:, None] * E + columns[None, :]
    x, log = tl.load(logits + place, mask=known, other=float("-inf")), tl.load(lse + token, mask=inside, other=0.0)
    share = tl.exp(x - log[:, None])
    score = _sigmoid(x) if SIGMOID else share
    counted = inside
    if valid is not None:
        counted = counted & (tl.load(valid + token, mask=inside, other=0) != 0)
    d_score, d = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.float32)
    if d_scores is not None:
        d_score += tl.load(d_scores + place, mask=known, other=0.0)
    if d_total is not None:
        of_share = tl.load(d_total + columns, mask=columns < E, other=0.0)[None, :]
        if SIGMOID:  # shares are scores over their sum
            one = tl.sum(score, 1)
            mean = tl.where(one >= TINY, tl.sum(score * of_share, 1) / tl.maximum(one, TINY), 0.0)
            of_share = (of_share - mean[:, None]) / tl.maximum(one, TINY)[:, None]
        d_score += tl.where(counted[:, None], of_share, 0.0)
    if d_weights is not None:
        choices, is_choice = token[:, None] * K + lanes[None, :], inside[:, None] & (lanes < K)[None, :]
        chosen = tl.load(experts + choices, mask=is_choice, other=0).to(tl.int32)
        of_choice = SCALE * tl.load(d_weights + choices, mask=is_choice, other=0.0)
        if DIVIDES:
            weight = tl.load(weights + choices, mask=is_choice, other=0.0) / SCALE
            mean = tl.sum(weight * of_choice, 1)
            if SIGMOID:
                picked = tl.load(logits + token[:, None] * E + chosen, mask=is_choice, other=float("-inf"))
                one = tl.sum(_sigmoid(picked), 1)
                of_choice -= tl.where(one > TINY, mean, 0.0)[:, None]
                of_choice /= tl.maximum(one, TINY)[:, None]
            else:
                of_choice = weight * (of_choice - mean[:, None])
        if DIVIDES and not SIGMOID:
            d += _scatter(of_choice, chosen, columns, lanes, K)
        else:
            d_score += _scatter(of_choice, chosen, columns, lanes, K)
    if SIGMOID:
        d += d_score * score * (1.0 - score)
    else:
        d += share * (d_score - tl.sum(share * d_score, 1)[:, None])
    if d_squares is not None:
        d += share * tl.where(counted, 2.0 * tl.load(d_squares) * log, 0.0)[:, None]
    high, middle, low = _parts(d)
    at = parts + 3 * token[:, None] * E + place
    tl.store(at, low, mask=known)
    tl.store(at + E, high, mask=known)
    tl.store(at + 2 * E, middle, mask=known)
    tl.store(at + 3 * E, high, mask=known)


def split_matrix(matrix: Tensor, parts: Tensor) -> None:
    """Cut an fp32 matrix [E, H] into bf16 parts (h, h, m, l), [4, E, H]. Products take three that follow each other."""
    if size := matrix.numel():
        _split[(triton.cdiv(size, SPLIT),)](matrix.contiguous(), parts, size, BLOCK=SPLIT, num_warps=WARPS)


def route(
    parts: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    given: Tensor | None,
    rule: Sequence[int],
    scale: float,
    results: tuple[Tensor, ...],
) -> None:
    """Route tokens by logits [T, 3, E] fp32, contiguous, whose three parts are summed.

    Args:
        valid: [T] bool; None: no padding.
        given: [T, k] int64: the experts; None: the best.
        rule: k, groups, chosen groups, experts of a group whose scores are its score, best experts by score that are
            counted, and 1 for sigmoid, and for weights divided by their sum.
        results: Logits [T, E], scores [T, E], log-sum-exps [T], experts [T, k] int64, weights [T, k], and sums over
            the tokens of each program [P, 4, C]: of shares, of choices, of the best, and of squared log-sum-exps (in
            column 0).
    """
    T, E = results[0].shape
    names = ("G", "GROUP_TOPK", "SCORED", "BEST", "SIGMOID", "DIVIDES")
    form = {"SCALE": scale, "GROUP_LANES": triton.next_power_of_2(rule[1]), **dict(zip(names, rule[1:], strict=True))}
    if T:
        inputs = (_contiguous(x) for x in (parts, bias, valid, given))
        _route[(results[-1].shape[0],)](*inputs, *results, T, **form, **_sizes(E, rule[0]), num_warps=WARPS)


def route_backward(*arguments: Tensor | Sequence[int] | float | None) -> None:
    """Compute the gradient of the logits in bf16 parts (l, h, m, h), [T, 4, E], the last argument.

    Of the others the first ones are results of ``route`` and its ``valid``, then the gradients of scores, weights, the
    sum of shares and that of squares; None for zero. Then ``rule`` and ``scale``.
    """
    *tensors, rule, scale, parts = arguments
    assert isinstance(parts, Tensor)
    assert isinstance(rule, Sequence)
    if T := parts.shape[0]:
        form = {"SIGMOID": rule[5], "DIVIDES": rule[6], "SCALE": scale}
        sizes = _sizes(parts.shape[2], rule[0])
        inputs = (_contiguous(x) for x in tensors if x is None or isinstance(x, Tensor))
        _route_backward[(triton.cdiv(T, sizes["TOKENS"]),)](*inputs, parts, T, **form, **sizes, num_warps=WARPS)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous().view(torch.uint8) if x.dtype == torch.bool else x.contiguous()


def _sizes(E: int, topk: int) -> dict[str, int]:
    tokens, columns = router_tile(E)
    return {"E": E, "K": topk, "TOKENS": tokens, "COLUMNS": columns, "LANES": triton.next_power_of_2(topk)}
