"""Megatron-LM's model and optimizer step by their formulas, on our parameters' names: what lines are held to.

Values come from the script's own arguments, never from our configuration. Sources: megatron/core of NVIDIA/Megatron-LM
(transformer/attention.py, transformer/moe/moe_utils.py, optimizer/clip_grads.py, optimizer_param_scheduler.py).

Shape letters: B batch, S sequence, H hidden, N heads, G groups, Q heads of a group, D of a head, T tokens, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = Mapping[str, str]


def number(given: Arguments, name: str, default: float) -> float:
    return float(given.get(name, default))


def norm(x: Tensor, weights: Mapping[str, Tensor], name: str, given: Arguments) -> Tensor:
    epsilon = number(given, "norm-epsilon", 1e-5)
    if given.get("normalization", "LayerNorm") == "LayerNorm":
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weights[f"{name}.weight"]


def turned(x: Tensor, given: Arguments) -> Tensor:
    """Rotary halves of the leading features R: feature i with feature i + R / 2. x [B, S, N, D], pairs as ours."""
    size = int(x.shape[3] * number(given, "rotary-percent", 1))
    order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
    return torch.cat((_turned(x[..., order], given), x[..., size:]), -1)


def _turned(x: Tensor, given: Arguments) -> Tensor:
    length, size = x.shape[1], x.shape[3]
    frequencies = number(given, "rotary-base", 10000) ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    if "use-rope-scaling" in given:
        frequencies = scaled(frequencies, number(given, "rope-scaling-factor", 8))
    angles = torch.arange(length, dtype=x.dtype)[:, None] * frequencies
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def scaled(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3's: as it is where it turns four times in 8192 positions, divided where it turns less than once."""
    turns = 8192 * frequencies / (2 * math.pi)
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def attention(x: Tensor, weights: Mapping[str, Tensor], name: str, given: Arguments) -> Tensor:
    qkv = torch.einsum("bsh,gqdh->bsgqd", x, weights[f"{name}.qkv.weight"])
    if f"{name}.qkv.bias" in weights:
        qkv = qkv + weights[f"{name}.qkv.bias"]
    if given.get("position-embedding-type") == "rope":
        both = qkv[..., :-1, :]
        qkv = torch.cat((turned(both.flatten(2, 3), given).view_as(both), qkv[..., -1:, :]), -2)
    queries, keys, values = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    scores = torch.einsum("bsgqd,btgd->bgqst", queries, keys) / math.sqrt(qkv.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -math.inf).softmax(-1)
    heads = torch.einsum("bgqst,btgd->bsgqd", shares, values).flatten(2)
    return linear(heads, weights, f"{name}.proj")


def linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def mlp(x: Tensor, weights: Mapping[str, Tensor], name: str, given: Arguments) -> Tensor:
    if "swiglu" in given:
        gate, up = weights[f"{name}.gate_up.weight"]
        return F.silu(x @ gate.T) * (x @ up.T) @ weights[f"{name}.down.weight"].T
    inner = linear(x, weights, f"{name}.up")
    return linear(inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2))), weights, f"{name}.down")


@dataclass
class Balance:
    """Auxiliary losses of a micro-batch, and how many tokens each expert of each layer got."""

    losses: list[Tensor] = field(default_factory=list)
    load: dict[str, Tensor] = field(default_factory=dict)


def routed(logits_TE: Tensor, bias_E: Tensor, given: Arguments) -> tuple[Tensor, Tensor]:
    """(weights, experts), [T, k] each."""
    topk = int(number(given, "moe-router-topk", 2))
    scaling = number(given, "moe-router-topk-scaling-factor", 1)
    if given.get("moe-router-score-function", "softmax") == "softmax":
        chosen, experts = logits_TE.topk(topk, dim=1)
        return chosen.softmax(-1) * scaling, experts
    scores = logits_TE.sigmoid()
    biased = scores + bias_E
    groups, best = int(number(given, "moe-router-num-groups", 1)), int(number(given, "moe-router-group-topk", 1))
    if groups > 1:
        grouped = biased.view(len(biased), groups, -1)
        worth = grouped.topk(topk // best, dim=-1).values.sum(-1)
        mask = torch.zeros_like(worth).scatter_(1, worth.topk(best, dim=1).indices, 1).bool()
        biased = grouped.masked_fill(~mask[..., None], -math.inf).flatten(1)
    experts = biased.topk(topk, dim=1).indices
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling, experts


def moe(x: Tensor, weights: Mapping[str, Tensor], name: str, given: Arguments, balance: Balance) -> Tensor:
    samples, length, features = x.shape
    tokens = x.reshape(-1, features)
    logits = tokens @ weights[f"{name}.router.weight"].T
    gates, experts = routed(logits, weights[f"{name}.router.correction_bias"], given)
    chosen = torch.zeros_like(logits).scatter_(1, experts, 1.0)
    balance.load[name] = chosen.sum(0)
    shares = logits.softmax(-1)
    if given.get("moe-router-score-function") == "sigmoid":
        shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    best = torch.zeros_like(logits).scatter_(1, shares.topk(experts.shape[1], dim=1).indices, 1.0)  # without the bias
    coefficient = number(given, "moe-aux-loss-coeff", 0)
    pieces = samples if given.get("moe-router-load-balancing-type") == "seq_aux_loss" else 1
    for part, pairs in zip(shares.chunk(pieces), best.chunk(pieces), strict=True):
        count, topk = len(part), experts.shape[1]
        loss = (part.sum(0) * pairs.sum(0)).sum() * len(pairs[0]) / (count * count * topk)
        balance.losses.append(coefficient * loss / pieces)
    balance.losses.append(number(given, "moe-z-loss-coeff", 0) * logits.logsumexp(-1).square().mean())
    out = torch.zeros_like(tokens)
    for expert in range(logits.shape[1]):
        gate, up = weights[f"{name}.experts.gate_up"][expert]
        inner = F.silu(tokens @ gate.T) * (tokens @ up.T)
        share = torch.where(experts == expert, gates, 0.0).sum(-1, keepdim=True)
        out = out + share * (inner @ weights[f"{name}.experts.down"][expert].T)
    if f"{name}.shared.down.weight" in weights:
        out = out + mlp(tokens, weights, f"{name}.shared", given)
    return out.view(samples, length, features)


def loss(weights: Mapping[str, Tensor], tokens: Tensor, labels: Tensor, given: Arguments) -> tuple[Tensor, Balance]:
    """A micro-batch's mean loss with its auxiliary losses."""
    balance = Balance()
    x = weights["embedding.word.weight"][tokens]
    if given.get("position-embedding-type", "learned_absolute") == "learned_absolute":
        x = x + weights["embedding.position.weight"][: tokens.shape[1]]
    for layer in range(int(given["num-layers"])):
        name = f"layers.{layer}"
        x = x + attention(norm(x, weights, f"{name}.attention_norm", given), weights, f"{name}.attention", given)
        y = norm(x, weights, f"{name}.mlp_norm", given)
        experts = f"{name}.moe.router.weight" in weights
        x = x + (moe(y, weights, f"{name}.moe", given, balance) if experts else mlp(y, weights, f"{name}.mlp", given))
    word = "lm_head.weight" if "untie-embeddings-and-output-weights" in given else "embedding.word.weight"
    logits = norm(x, weights, "final_norm", given) @ weights[word].T
    mean = (logits.logsumexp(-1) - logits.gather(-1, labels[..., None]).squeeze(-1)).mean()
    return mean + sum(balance.losses), balance


def scheduled(step: int, peak: float, floor: float, style: str, warmup: int, end: int, last: int, shape: str) -> float:
    """Megatron's OptimizerParamScheduler, steps as iterations."""
    if warmup > 0 and step <= warmup:
        return peak * step / warmup
    if style == "constant":
        return peak
    if step > end:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
    share = (step - warmup) / (end - warmup)
    if style == "WSD":
        share = max(0.0, (step - (end - last)) / last)
    left = {
        "linear": 1 - share,
        "cosine": 0.5 * (math.cos(math.pi * share) + 1),
        "exponential": 2 * 0.5**share - 1,
        "minus_sqrt": 1 - math.sqrt(share),
    }
    return floor + left[shape if style == "WSD" else style] * (peak - floor)


def rate(step: int, given: Arguments) -> float:
    """The learning rate of a step, counted from 0; without a warm-up."""
    end = int(number(given, "lr-decay-iters", number(given, "train-iters", 0)))
    style = given.get("lr-decay-style", "linear")
    return scheduled(step, number(given, "lr", 0), number(given, "min-lr", 0), style, 0, end, 0, "")


def clip(gradients: Mapping[str, Tensor], given: Arguments) -> tuple[float, dict[str, Tensor]]:
    """The norm, and the clipped gradients."""
    total = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    factor = min(1.0, number(given, "clip-grad", 1.0) / (total + 1e-6))
    return total, {name: gradient * factor for name, gradient in gradients.items()}


def decay(name: str, given: Arguments) -> float:
    """Weight decay, of all weights but biases and norms."""
    return 0.0 if name.endswith("bias") or "norm." in name else number(given, "weight-decay", 0.01)


@dataclass
class Sgd:
    """torch's SGD, as Megatron calls it: decay is added to the gradient; momenta by name."""

    given: Arguments
    momenta: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float:
        """Clips, then changes the weights; the norm."""
        total, clipped = clip(gradients, self.given)
        momentum, lr = number(self.given, "sgd-momentum", 0.9), rate(self.steps, self.given)
        self.steps += 1
        for name, gradient in clipped.items():
            decayed = gradient + decay(name, self.given) * weights[name]
            self.momenta[name] = momentum * self.momenta.get(name, 0.0) + decayed
            weights[name].sub_(lr * self.momenta[name])
        return total


@dataclass
class Adam:
    """Decoupled weight decay; moments by name."""

    given: Arguments
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float:
        """Clips, then changes the weights; the norm."""
        total, clipped = clip(gradients, self.given)
        beta1, beta2 = number(self.given, "adam-beta1", 0.9), number(self.given, "adam-beta2", 0.999)
        lr = rate(self.steps, self.given)
        self.steps += 1
        for name, gradient in clipped.items():
            m = self.first[name] = beta1 * self.first.get(name, 0.0) + (1 - beta1) * gradient
            v = self.second[name] = beta2 * self.second.get(name, 0.0) + (1 - beta2) * gradient.square()
            spread = (v / (1 - beta2**self.steps)).sqrt() + number(self.given, "adam-eps", 1e-8)
            decayed = decay(name, self.given) * weights[name]
            weights[name].sub_(lr * (m / (1 - beta1**self.steps) / spread + decayed))
        return total
