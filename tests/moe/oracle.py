"""Plain-Python doubles of what megapar.moe computes: loops over tokens, no sorting, no grouping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.moe.layer import MoeLayer
from megapar.moe.sizes import MoeSizes

Pair = tuple[int, int]


def keep(
    experts: Sequence[Sequence[int]],
    probs: Sequence[Sequence[float]],
    valid: Sequence[bool],
    capacity: int,
    policy: str,
) -> set[Pair]:
    """The kept (token, choice) pairs, by walking the queue that each policy describes."""
    pairs = [(t, c) for t in range(len(experts)) for c in range(len(experts[t])) if valid[t]]
    queues: Mapping[str, Callable[[Pair], Any]] = {
        "token": lambda pair: pair,
        "choice": lambda pair: (pair[1], pair[0]),
        "probs": lambda pair: (-probs[pair[0]][experts[pair[0]][pair[1]]], pair[0]),
    }
    pairs.sort(key=queues[policy])
    room: dict[int, int] = {}
    kept = set()
    for t, c in pairs:
        taken = room.setdefault(experts[t][c], 0)
        if taken < capacity:
            kept.add((t, c))
            room[experts[t][c]] = taken + 1
    return kept


def one_expert(layer: MoeLayer, expert: int, x_H: Tensor) -> Tensor:
    """One token through one expert."""
    experts = layer.experts
    has_bias = layer.sizes.add_bias
    if layer.sizes.gated:
        gate, up = (experts.gate_up[expert, i] @ x_H for i in (0, 1))
        if has_bias:
            gate, up = gate + experts.gate_up_bias[expert, 0], up + experts.gate_up_bias[expert, 1]
        hidden = F.silu(gate) * up
    else:
        hidden = experts.up[expert] @ x_H
        hidden = F.gelu(hidden + experts.up_bias[expert] if has_bias else hidden)
    out = experts.down[expert] @ hidden
    return out + experts.down_bias[expert] if has_bias else out


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {"softmax": lambda row: row.softmax(0), "sigmoid": Tensor.sigmoid}
"""The scores of one token, by ``--moe-router-score-function``."""


def best_of(sizes: MoeSizes, scores: list[float]) -> list[int]:
    """The experts of one token, best first."""
    size = sizes.num_experts // sizes.groups
    groups = [scores[g * size : (g + 1) * size] for g in range(sizes.groups)]
    worth = [sum(sorted(group)[-(sizes.group_score_topk or sizes.topk // sizes.group_topk) :]) for group in groups]
    best = sorted(range(sizes.groups), key=lambda g: -worth[g])[: sizes.group_topk]
    return sorted((e for e in range(sizes.num_experts) if e // size in best), key=lambda e: -scores[e])[: sizes.topk]


def by_score(sizes: MoeSizes, scores: Tensor) -> list[int]:
    """The experts that the balance losses count for one token: by score, without bias and groups."""
    return sorted(range(sizes.num_experts), key=lambda e: -float(scores[e].detach()))[: sizes.topk]


def sequence_loss(layer: MoeLayer, x_BSH: Tensor, valid_BS: Tensor) -> Tensor:
    """Sum of the samples' own load-balance losses."""
    sizes, total = layer.sizes, x_BSH.new_zeros(())
    for sample, valid_S in zip(x_BSH, valid_BS, strict=True):
        scores = [layer.router.weight @ x_H for x_H, ok in zip(sample, valid_S, strict=True) if ok]
        if not scores:
            continue
        scores = [SCORES[sizes.score](row) for row in scores]
        shares = sum((row / row.sum() for row in scores), torch.zeros(())) / len(scores)
        chosen = [e for row in scores for e in by_score(sizes, row)]
        counts = torch.tensor([chosen.count(e) / len(scores) for e in range(sizes.num_experts)], dtype=x_BSH.dtype)
        total = total + sizes.num_experts / sizes.topk * (shares * counts).sum()
    return total


def dense(layer: MoeLayer, x_BSH: Tensor, valid_BS: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], int]:
    """(y, aux, z, load, dropped) of a layer, token by token; differentiable."""
    sizes: MoeSizes = layer.sizes
    batch, length, _ = x_BSH.shape
    order = [(b, s) for s in range(length) for b in range(batch)]  # by position, then sample
    rows = {at: layer.router.weight @ x_BSH[at] for at in order}
    probs = {at: SCORES[sizes.score](row) for at, row in rows.items()}
    experts = {at: best_of(sizes, (probs[at] + layer.router.correction_bias).tolist()) for at in order}
    valid = [bool(valid_BS[at]) for at in order]
    tokens = sum(valid)
    capacity = tokens
    if sizes.kind == "deepspeed_moe":
        exact = tokens / sizes.num_experts * sizes.capacity_factor * sizes.topk
        capacity = max(math.ceil(exact - 1e-9), sizes.min_capacity)
    plain = [probs[at].tolist() for at in order]
    kept = keep([experts[at] for at in order], plain, valid, capacity, sizes.drop_policy)

    y = torch.zeros_like(x_BSH)
    for index, at in enumerate(order):
        choices = [c for c in range(sizes.topk) if (index, c) in kept]
        over = choices if sizes.kind == "deepspeed_moe" else range(sizes.topk)
        total = sum((probs[at][experts[at][c]] for c in over), torch.zeros(()))
        for c in choices:
            divided = {"auto": sizes.topk > 1, "on": True, "off": False}[sizes.norm_topk_prob]
            weight = probs[at][experts[at][c]] / (total if divided else 1.0)
            y = y.index_put(
                tuple(torch.tensor(i) for i in at),
                sizes.scaling * weight * one_expert(layer, experts[at][c], x_BSH[at]),
                accumulate=True,
            )
        if layer.shared is not None:
            y = y.index_put(tuple(torch.tensor(i) for i in at), layer.shared(x_BSH[at]), accumulate=True)

    load, best, first = ([0] * sizes.num_experts for _ in range(3))
    for is_valid, at in zip(valid, order, strict=True):
        if is_valid:
            for expert in experts[at]:
                load[expert] += 1
            for expert in by_score(sizes, probs[at]):
                best[expert] += 1
            first[by_score(sizes, probs[at])[0]] += 1
    first_only = sizes.kind == "deepspeed_moe" and sizes.drop_policy == "choice"
    mean = max(tokens, 1)
    mean_probs = (
        sum(
            (
                probs[at] / (1 if sizes.score == "softmax" else probs[at].sum())
                for ok, at in zip(valid, order, strict=True)
                if ok
            ),
            torch.zeros(()),
        )
        / mean
    )
    counted = torch.tensor(first if first_only else best, dtype=x_BSH.dtype) / mean
    aux = sizes.num_experts / (1 if first_only else sizes.topk) * (mean_probs * counted).sum()
    logits = [layer.router.weight @ x_BSH[at] for ok, at in zip(valid, order, strict=True) if ok]
    z = sum((torch.logsumexp(row, 0) ** 2 for row in logits), torch.zeros(())) / mean
    return y, aux, z, load, tokens * sizes.topk - len(kept)
